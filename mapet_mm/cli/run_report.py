"""The page of a RUN of `mapet-mm pretrain`: verdict, curves, features, codebook, command and versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from mapet_mm.cli.methods import METHODS
from mapet_mm.datasets.pictures import spread
from mapet_mm.dependencies import version_report
from mapet_mm.engine.hooks.knn_probe_hook import PER_CLASS, TOP1
from mapet_mm.evaluation.extraction import take_features
from mapet_mm.evaluation.images import ImageSet
from mapet_mm.evaluation.models import Model
from mapet_mm.evaluation.tokens import swaps_channels
from mapet_mm.evaluation.verdict import RESULT, Verdict
from mapet_mm.interop.model_card import command_of
from mapet_mm.structures import TokenStore
from mapet_mm.structures.names import read_lines
from mapet_mm.utils.run_folder import BEST, IMAGES, Run
from mapet_mm.visualization.codebook_sheet import codebook_section
from mapet_mm.visualization.curves import PIXEL_PANEL, PRETRAINING_PANELS, Panel, curves_section
from mapet_mm.visualization.features import (
    LastAttention,
    nearest_images,
    neighbours_figure,
    patches_figure,
    principal_colours,
)
from mapet_mm.visualization.report import Report, Section
from mapet_mm.visualization.token_statistics import TokenUsage, measure_usage
from mapet_mm.visualization.training_log import read_scalars
from mapet_mm.visualization.verdict import verdict_section

KNN_FIGURES = {TOP1: "top-1 (%)", PER_CLASS: "mean per class (%)"}  # a training logs one of them
COLOURED = 8  # images, four in a figure
IN_A_FIGURE = 4
QUERIES = 5
NEIGHBOURS = 5


def method_words(run: Run) -> str:
    """A sentence about the method of a RUN, for its verdict; none about the paper's."""
    return METHODS[run.options.get("method", "mapet")].verdict_words


def report_of_run(
    run: Run,
    verdict: Verdict,
    models: Mapping[str, Model],
    images: Mapping[str, ImageSet],
    cache: Path,
) -> Report:
    """The page's contents.

    Args:
        run: the folder.
        verdict: of `judge`.
        models: the verdict's, by name.
        images: of the verdict: `val` and, with labels, `train`.
        cache: folder of the features.
    """
    names = read_lines(run / IMAGES)
    store = TokenStore.open(run.store)
    root = run.images
    shown = {name: models[name] for name in (verdict.compared_with, RESULT)}
    usage = measure_usage(store) if store.has_tokens else None
    sections = [*verdict_section(verdict.as_json()), curves_of(run, usage)]
    sections += patches_sections(shown, images["val"])
    sections.append(neighbours_section(models[RESULT], images, cache))
    if usage:
        sections.append(codebook_section(store, usage, root))
    return Report(
        title="Pre-training on your images",
        summary=f"{verdict.sentence} {len(names):,} images in {root}.",
        results=verdict.table,
        sections=sections,
        facts=[tuple(line.split(maxsplit=1)) for line in version_report().splitlines() if " " in line],
        commands=[
            command_of(run, full_paths=True),
            f"{Run(run.folder.absolute()).backbone}  # in an OpenMMLab config",
        ],
    )


def curves_of(run: Run, usage: TokenUsage | None) -> Section:
    """Loss, token accuracy if there are tokens, and with labels k-NN by epoch."""
    folder = run.work_dir
    panels = PRETRAINING_PANELS if usage else (PIXEL_PANEL,)
    entropy = usage.entropy if usage else None
    records = read_scalars(folder)
    key = PER_CLASS if any(PER_CLASS in record for record in records) else TOP1
    probes = {record["step"]: record[key] for record in records if key in record}
    if not probes:
        return curves_section(folder, panels, entropy)
    of_probes = Panel("k-NN during the pre-training", KNN_FIGURES[key], "", key)
    section = curves_section(folder, [*panels, of_probes], entropy)
    best = max(probes, key=probes.get)
    words = f" k-NN was best after epoch {best} ({probes[best]:.1f} %)"
    if (folder / BEST).is_file():
        words += (
            f", whose weights are in {folder / BEST}. They were chosen on images of the verdict, so "
            "a verdict on them would be too good"
        )
    return section._replace(caption=f"{section.caption}{words}.")


def patches_sections(models: Mapping[str, Model], images: ImageSet) -> list[Section]:
    """Features of eight images' patches as colours, and the class token's attention; none without patches."""
    chosen = spread(range(len(images)), COLOURED)
    batch = torch.stack([images[index]["inputs"] for index in chosen])
    pictures = [picture_of(images, index, models[RESULT]) for index in chosen]
    colours = {}
    attention = {}
    for name, model in models.items():
        with LastAttention() as last:
            tokens = model.backbone(model.backbone.normalise(batch))
        if tokens.patches is None:
            return []
        colours[name] = principal_colours(tokens.patches[-1].float().cpu().unflatten(1, tokens.grid))
        shares = last.of_class_token(tokens.grid) if tokens.class_token is not None else None
        if shares is not None:
            attention[name] = shares.numpy()
    caption = (
        "The first three principal components of the patches' features, over these held-out images, as red, "
        "green and blue: patches of one colour are alike to the model."
    )
    sections = [Section("What the patches' features tell apart", caption, patches_figures(pictures, colours))]
    if attention:
        caption = (
            "How much the class token attends to each patch in the last layer, mean over heads: black least, "
            "yellow most, each image by itself."
        )
        figures = patches_figures(pictures, attention)
        sections.append(Section("Where the class token looks", caption, figures))
    return sections


def patches_figures(pictures: Sequence[np.ndarray], shown: Mapping[str, np.ndarray]) -> list[Figure]:
    """Figures of a few images each, which wrap on a narrow page."""
    figures = []
    for start in range(0, len(pictures), IN_A_FIGURE):
        part = slice(start, start + IN_A_FIGURE)
        figures.append(patches_figure(pictures[part], {name: found[part] for name, found in shown.items()}))
    return figures


def neighbours_section(model: Model, images: Mapping[str, ImageSet], cache: Path) -> Section:
    """Five held-out images and the images that are most alike to the pre-trained model."""
    val = images["val"]
    known = images.get("train", val)
    queries = spread(range(len(val)), QUERIES)
    features = take_features(model, val, cache)
    setting = features.settings[-1]
    values = take_features(model, known, cache).pooled(setting)
    own = features.pooled(setting, images=torch.tensor(queries))
    found, cosines = nearest_images(own, values, NEIGHBOURS, itself=known is val)
    same_class = None
    if known.labels is not None and val.labels is not None:
        same_class = (known.labels[found] == val.labels[queries][:, None]).tolist()
    figure = neighbours_figure(
        [picture_of(val, index, model) for index in queries],
        [[picture_of(known, index, model) for index in line] for line in found.tolist()],
        cosines,
        same_class,
    )
    whose = "training images" if known is not val else "other held-out images"
    framed = "" if same_class is None else " Green frame: of the same class; orange: of another."
    caption = (
        f"Left: held-out images. Beside each, the {whose} with the highest cosine of the features.{framed}"
    )
    return Section("Nearest neighbours", caption, [figure])


def picture_of(images: ImageSet, index: int, model: Model) -> np.ndarray:
    """An image as the model gets it, in RGB."""
    pixels: Tensor = images[index]["inputs"]
    if swaps_channels(model.backbone.preprocessor):
        pixels = pixels.flip(0)
    return pixels.permute(1, 2, 0).to(torch.uint8).numpy()
