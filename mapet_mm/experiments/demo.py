"""What the demo reports: results with and without pre-training, the pictures, the machine."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mmengine.config import Config

from mapet_mm.experiments.benchmark import processor
from mapet_mm.experiments.stages import StageRunner
from mapet_mm.models.objectives import OBJECTIVES
from mapet_mm.tokenizers.store import TokenStore
from mapet_mm.visualization.attention_masks import GROUP_NAMES, attention_mask_figure
from mapet_mm.visualization.codebook_sheet import (
    SheetRow,
    choose_members,
    count_patches,
    draw_codebook_sheet,
    find_members,
)
from mapet_mm.visualization.curves import PRETRAINING_PANELS, curve_figure, last_value, read_scalars
from mapet_mm.visualization.report import Column, Section, Table
from mapet_mm.visualization.segmentation import predict_images, segmentation_figure
from mapet_mm.visualization.token_usage import measure_usage

LIBRARIES = ("torch", "torchvision", "mmengine", "mmcv", "mmpretrain", "mmseg", "mapet_mm")
RESULT_COLUMNS = (
    Column("task"),
    Column("no pre-training", ".1f"),
    Column("MaPeT", ".1f"),
    Column("gain", "+.1f"),
)


@dataclass(frozen=True)
class Comparison:
    """The same training from random weights and from the pre-trained ones.

    Args:
        task: what was trained and what is measured, with its unit.
        metric: the name under which MMEngine logs it.
        scratch: work directory of the training without pre-training.
        pretrained: work directory of the training with it.
    """

    task: str
    metric: str
    scratch: str
    pretrained: str


def results_table(comparisons: Sequence[Comparison], notes: Sequence[str] = ()) -> Table:
    """The last validation of each training, without and with pre-training, and the gain in points.

    Raises:
        FileNotFoundError: a work directory has no log.
        KeyError: a metric was never logged.
    """
    rows = []
    for one in comparisons:
        scratch, pretrained = (last_value(folder, one.metric) for folder in (one.scratch, one.pretrained))
        rows.append([one.task, scratch, pretrained, pretrained - scratch])
    return Table(RESULT_COLUMNS, rows, notes)


def stage_table(runner: StageRunner, others: Sequence[tuple[str, float]] = ()) -> Table:
    """Seconds of each stage, after those of what ran before them."""
    rows = [*others, *((stage.name, runner.seconds(stage)) for stage in runner.stages)]
    note = "Stages run side by side where they can, so the sum is more than the time on the clock."
    return Table([Column("stage"), Column("seconds", ".0f")], [list(row) for row in rows], [note])


def machine_facts(jobs: int) -> list[tuple[str, str]]:
    """Processor, threads and versions that the figures depend on."""
    versions = [(name, importlib.import_module(name).__version__) for name in LIBRARIES]
    return [
        ("system", f"{platform.system()} {platform.machine()}"),
        ("processor", f"{processor()}, {os.cpu_count()} cores"),
        ("side by side", f"{jobs} stages with one thread each"),
        ("Python", platform.python_version()),
        *versions,
    ]


def final_checkpoint(config: str | os.PathLike, work_dir: str | os.PathLike) -> str:
    """The checkpoint that a training with this config writes last."""
    loop = Config.fromfile(config).train_cfg
    name = f"epoch_{loop.max_epochs}.pth" if "max_epochs" in loop else f"iter_{loop.max_iters}.pth"
    return str(Path(work_dir) / name)


def curves_section(work_dir: str | os.PathLike, reference: str | os.PathLike | None) -> Section:
    """Loss and token accuracy of the pre-training, in front of a committed reference run."""
    records = read_scalars(work_dir)
    behind = None if reference is None else read_scalars(reference)
    caption = "Training: mean over each epoch. Validation: the same permutations every time."
    if reference is not None:
        caption += f" Grey: the committed reference run, {reference}."
    figures = [curve_figure(panel, records, behind) for panel in PRETRAINING_PANELS]
    return Section("Pre-training", caption, figures)


def codebook_section(store_path: str | os.PathLike, image_root: str | os.PathLike, seed: int = 0) -> Section:
    """Patches that share a token: the most used tokens, and some drawn at random."""
    store = TokenStore.open(store_path)
    usage = measure_usage(store)
    choices = usage.most_used(6), usage.random(6, seed)
    members = find_members(store, [token for tokens in choices for token in tokens])
    rows = {
        token: SheetRow(f"token {token}: {count_patches(len(patches))}", choose_members(patches, 6, seed))
        for token, patches in members.items()
    }
    figures = [
        draw_codebook_sheet([rows[token] for token in tokens], image_root, store.grid) for tokens in choices
    ]
    caption = (
        "One token a row, its patch framed in red in its surroundings: the six most used of "
        f"{store.vocab_size} tokens, and six drawn at random (seed {seed})."
    )
    return Section("Patches that share a token", caption, figures)


def masks_section() -> Section:
    """The attention masks of the three objectives, from the code that training uses."""
    names = ", ".join(f"{group} {name}" for group, name in GROUP_NAMES.items())
    caption = (
        "Rows attend to columns; a coloured cell is one that is seen. Drawn from the function that builds "
        f"the masks of the model, with 3 context tokens and 4 targets. {names}; nobody attends to Q."
    )
    return Section("Who sees whom", caption, [attention_mask_figure([one]) for one in OBJECTIVES.values()])


def segmentation_section(config: str | os.PathLike, checkpoint: str | os.PathLike, count: int = 6) -> Section:
    """Ground truth and prediction on the first validation images, in two columns."""
    images, classes = predict_images(config, checkpoint, count)
    half = (len(images) + 1) // 2
    figures = [segmentation_figure(part, classes) for part in (images[:half], images[half:]) if part]
    return Section("Segmentation", f"The first {len(images)} validation images, with pre-training.", figures)
