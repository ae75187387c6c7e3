"""The commands as Python functions, for notebooks and scripts: pretrain, finetune, evaluate, load."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import UInt8
from torch import Tensor, nn

from mapet_mm.cli.command_options import Options
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.run_folder import Run

if TYPE_CHECKING:
    import pandas as pd
    from PIL import Image

FEATURES = Path("work_dirs/features")


class Loaded(NamedTuple):
    """A backbone in evaluation mode, and what turns one of its images into its input."""

    model: nn.Module
    transform: Callable[[Any], Tensor]


class Rows(list):
    """Figures of an evaluation, each a `mapet_mm.evaluation.tables.Row`."""

    @property
    def frame(self) -> pd.DataFrame:
        """The same as a data frame, a row for each figure; ImportError without pandas."""
        import pandas as pd

        return pd.DataFrame([asdict(row) for row in self])


def pretrain(images: str | os.PathLike, out: str | os.PathLike, **options: Any) -> Run:
    """Pre-train a ViT on a folder of images, as `mapet-mm pretrain` does; call it again to resume.

    Args:
        images: folder of images, searched recursively.
        out: folder for everything that is made.
        **options: those of the command, with underscores: `init="timm:NAME"`,
            `epochs=100`, `arch="tiny"`, `batch_size=64`, `workers=8`, `no_verdict=True`, ...

    Raises:
        UserError: something that you can correct, in one line.

    Examples:
        >>> run = mapet_mm.pretrain("photos", "run", arch="tiny", epochs=30)  # doctest: +SKIP
        >>> run.verdict["sentence"]  # doctest: +SKIP
        'No gain seen over random weights (k-NN ...).'
    """
    from mapet_mm.cli.options import PretrainOptions
    from mapet_mm.cli.pretrain import pretrain as run_job

    _require_known("pretrain", PretrainOptions, options)
    run_job(PretrainOptions(images=images, out=out, **options))
    return Run(Path(out))


def finetune(run: str | os.PathLike, out: str | os.PathLike, **options: Any) -> dict[str, Any]:
    """Train a classifier or a segmentor on your labels, as `mapet-mm finetune` does; call it again to resume.

    Args:
        run: what `pretrain` made.
        out: folder for everything that is made.
        **options: those of the command, with underscores: `images="photos"` or `masks=(IMAGES, MASKS)`,
            `epochs=20`, `groups=1`, `no_compare=True`, ...

    Returns:
        What the pre-training was worth, as OUT/result.json has it: `sentence`, and `measures` with their
        intervals.

    Raises:
        UserError: something that you can correct, in one line.

    Examples:
        >>> worth = mapet_mm.finetune("run", "classifier", images="photos")  # doctest: +SKIP
        >>> worth["sentence"]  # doctest: +SKIP
        "No gain seen over the start's weights (top-1 ...)."
    """
    from mapet_mm.cli.finetune import RESULTS
    from mapet_mm.cli.finetune import finetune as run_job
    from mapet_mm.cli.finetuning.options import FinetuneOptions

    _require_known("finetune", FinetuneOptions, options)
    args = FinetuneOptions(run=run, out=out, **options)
    run_job(args)
    return json.loads((args.out / RESULTS).read_text())


def _require_known(command: str, kind: type[Options], options: Mapping[str, Any]) -> None:
    """UserError for an option that a command has not."""
    known = [one.name for one in fields(kind)]
    for name in options:
        if name not in known:
            raise UserError(f"{command} has no {name}=: its options are {', '.join(known)}")


def evaluate(
    model: str | os.PathLike,
    data: str | os.PathLike | None = None,
    protocols: Sequence[str] | None = None,
    checkpoint: str | os.PathLike | None = None,
    cache: str | os.PathLike = FEATURES,
    every: bool = False,
    labels: str | os.PathLike | None = None,
    class_level: int | str | None = None,
    workers: int | None = None,
    groups: int | str | os.PathLike | None = None,
    pictures: Mapping[str, Any] | None = None,
    tiles: int | str | Sequence[int] | None = None,
) -> Rows:
    """Figures of a model's frozen features, as `mapet-mm evaluate` prints them.

    Args:
        model: a RUN, a config, `timm:NAME`, `hf:NAME` or `mapet://NAME`.
        data: folder of images, or a config that names image sets; None takes those that the model names.
        protocols: names such as "NearestNeighbours"; None runs those that take seconds after the features.
        checkpoint: weights to take instead of the model's own.
        cache: folder in which features are kept.
        every: run the expensive protocols, too.
        labels: file of lines `name class`, in place of a folder's own classes.
        class_level: level of the folders that are classes, 1 for those directly in the folder, or "none".
        workers: processes that load images; None for those that a config names, else up to 8.
        groups: images that belong together, as a patient's: level of the folders, or file of lines
            `name group`. Whole groups are tested on, drawn for few labels and resampled for intervals.
        pictures: options of `mapet_mm.LoadPicture` for images that are no photographs, such as
            `dict(range=(0, 4095))`; not for a model that says itself how it reads them. The range may be two
            percentiles of the images of the folder, `("1%", "99%")`.
        tiles: side, or side and overlap, in pixels of the tiles into which each picture of the folder is
            divided, each an image then.

    Raises:
        UserError: no such model, images or protocol.

    Examples:
        >>> rows = mapet_mm.evaluate("run", "photos")  # doctest: +SKIP
        >>> rows.frame[["protocol", "setting", "value"]]  # doctest: +SKIP
    """
    from mapet_mm.cli.command_options import Option
    from mapet_mm.cli.data_options import CLASS_LEVEL, GROUPS, TILES
    from mapet_mm.cli.other_classes import with_other_classes
    from mapet_mm.evaluation.folders import pictures_in_numbers
    from mapet_mm.evaluation.images import Data
    from mapet_mm.evaluation.models import load_model
    from mapet_mm.evaluation.run import evaluate as evaluate_models
    from mapet_mm.utils.dist import choose_device

    choose_device()
    pictures = pictures_in_numbers(pictures or {}, _as_text(data))
    loaded = load_model(os.fspath(model), _as_text(checkpoint), pictures=pictures)
    said = dict(class_level=class_level, groups=groups, tiles=tiles)
    for name, kind in (("class_level", CLASS_LEVEL), ("groups", GROUPS), ("tiles", TILES)):
        if said[name] is not None:
            said[name] = Option(kind, "").read(name, said[name])
    asked = Data(_as_text(data), _as_text(labels), workers=workers, **said)
    config, asked = with_other_classes(loaded.config, os.fspath(model), asked, Path(cache))
    loaded = replace(loaded, config=config)
    (rows,) = evaluate_models({loaded.name: loaded}, asked, Path(cache), protocols, every).values()
    return Rows(rows)


def load(
    name: str | os.PathLike,
    checkpoint: str | os.PathLike | None = None,
    pictures: Mapping[str, Any] | None = None,
) -> Loaded:
    """A pre-trained backbone in evaluation mode, with the transform of its images.

    Args:
        name: the folder of a `pretrain`, which gives timm's ViT, and a line if its training has gone on since
            that was exported; or any model that `evaluate` takes, of which
            timm's and Hugging Face's are their own classes, and a config gives MMPretrain's.
        checkpoint: weights to take instead of the model's own.
        pictures: as for `evaluate`.

    Returns:
        `model`, and `transform`, which takes a path or a PIL image and gives a normalised tensor `(3, H, W)`.

    Raises:
        UserError: no such model, or weights that are not its.

    Examples:
        >>> vit, transform = mapet_mm.load("run")  # doctest: +SKIP
        >>> vit(transform("photos/cat.jpg")[None]).shape  # doctest: +SKIP
        torch.Size([1, 384])
    """
    from mapet_mm.datasets.look import as_in_training
    from mapet_mm.evaluation.models import load_model
    from mapet_mm.utils.dist import print_once

    name = os.fspath(name)
    run = Run(Path(name))
    exported = run.export("timm")
    if exported.is_dir() and checkpoint is None:
        newer = run.newer_checkpoint(exported)
        if newer:
            print_once(
                f"{name}: timm's export, made before {newer.name} of the training that goes on: "
                f"checkpoint={os.fspath(newer)!r} loads that"
            )
        name = f"timm:local-dir:{exported}"
    loaded = load_model(name, _as_text(checkpoint), pictures=pictures)
    pipeline = loaded.config.test_dataloader.dataset.pipeline
    if run.exists:
        pipeline = as_in_training(pipeline, run.config)
    return Loaded(loaded.backbone.network, PipelineTransform(pipeline, loaded.backbone.normalise))


class PipelineTransform:
    """Prepares one image by the pipeline of a test, and normalises it.

    Args:
        pipeline: configs of its steps.
        normalise: of a batch of images.
    """

    def __init__(self, pipeline: Sequence[Mapping[str, Any]], normalise: Callable[[Tensor], Tensor]) -> None:
        from mmengine.dataset import Compose
        from mmengine.registry import DefaultScope

        with DefaultScope.overwrite_default_scope("mmpretrain"):
            self.load, *self.steps = Compose(list(pipeline)).transforms
        self.normalise = normalise

    def __call__(self, image: str | os.PathLike | Image.Image) -> Tensor:
        """The input `(3, H, W)` for an image; PictureError for a path of none that can be read."""
        from mapet_mm.datasets.pictures import PictureError
        from mapet_mm.datasets.reading import read_whole
        from mapet_mm.utils.errors import reason_of

        if isinstance(image, str | os.PathLike):
            try:
                results = read_whole(self.load, dict(img_path=os.fspath(image)))
            except (UserError, ImportError):
                raise
            except Exception as error:  # of any decoder
                raise PictureError(f"image `{image}` cannot be read: {reason_of(error)}") from error
        else:
            pixels = as_if_loaded(image, self.load)
            results = dict(img=pixels, img_shape=pixels.shape[:2], ori_shape=pixels.shape[:2])
        for step in self.steps:
            results = step(results)
        return self.normalise(results["inputs"][None])[0]


def as_if_loaded(image: Image.Image, load: Callable[[dict], dict]) -> UInt8[np.ndarray, "height width band"]:
    """The pixels of a PIL image, as a transform loads them from its file, turned as its EXIF data say.

    Raises:
        PictureError: more than 8 bits, and a transform that does not say what becomes of them, or a PGM, of
            which Pillow has other values than its file.
    """
    from PIL import ImageOps

    from mapet_mm.datasets import LoadPicture
    from mapet_mm.datasets.pictures import PictureError
    from mapet_mm.datasets.pixels import Pixels

    if image.format == "PPM" and image.mode == "I":
        raise PictureError("Pillow has stretched the 16 bits of this PGM, whatever its range: give its path")
    image = ImageOps.exif_transpose(image)
    if not image.mode.startswith(("I", "F")):
        image = image.convert("RGB")
    if not isinstance(load, LoadPicture):
        load = LoadPicture()
    return load.mapped(load.taken(Pixels(np.atleast_3d(np.asarray(image)))))


def _as_text(path: str | os.PathLike | None) -> str | None:
    return None if path is None else os.fspath(path)
