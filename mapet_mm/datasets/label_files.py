"""Label files of segmentation, looked at before a training or an evaluation takes them for class indices."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped
from mmcv.transforms import LoadImageFromFile
from mmengine import fileio
from PIL import Image, UnidentifiedImageError
from torch.utils.data import Dataset
from tqdm import tqdm

from mapet_mm.datasets.pictures import look_at
from mapet_mm.datasets.pipelines import find_step, leaf_datasets, own_randomness, pipeline_steps
from mapet_mm.datasets.transforms.labels import (
    IGNORED,
    GreyLabels,
    LabelFileError,
    MapLabels,
    one_channel,
)
from mapet_mm.utils.errors import reason_of

SAMPLE = 33  # label files of a dataset that are looked at: the first, the last, and some in between
EIGHT_BITS = ("1", "L", "P", "LA", "RGB", "RGBA")  # Pillow's modes
# What steps of these libraries do to labels is known; one from elsewhere may make class indices of colours.
KNOWN = ("mmcv", "mmengine", "mmseg", "mmpretrain", "mmdet", "mapet_mm")
DIVIDE = (
    "masks of 0 and 255 are for viewing; in their folder, this makes classes 0 and 1 of them: python -c "
    '"import glob, PIL.Image as I; '
    "[I.open(p).convert('L').point(lambda v: v // 255).save(p) for p in glob.glob('*.png')]\""
)


class OneClassError(LabelFileError):
    """The label files of a dataset have one class alone, or none."""


@dataclass(frozen=True)
class Classes:
    """The labels that a model or a metric takes: 0 to `count` - 1, and one that it ignores.

    With `reduce_zero_label`, labels are one lower than in their files, where 0 is ignored.
    """

    count: int
    ignored: int = IGNORED
    reduce_zero_label: bool = False

    def found_in(self, labels: Int[np.ndarray, "height width"], path: str) -> set[int]:
        """The classes among the labels of a file; LabelFileError if others are there, too."""
        values = set(np.unique(labels).tolist()) - {self.ignored}
        unknown = sorted(values - set(range(self.count)))
        if not unknown:
            return values
        remedy = ""
        if self.reduce_zero_label:
            remedy = "; `reduce_zero_label=True` has made each lower by 1"
        elif unknown == [self.count]:
            remedy = "; if 0 means unlabelled, set `reduce_zero_label=True`"
        elif unknown == [IGNORED] and values <= {0, IGNORED}:
            remedy = f": {DIVIDE}"
        raise LabelFileError(
            f"labels of `{path}` go from {min(values)} to {max(values)}: classes are 0 to {self.count - 1}, "
            f"and {self.ignored} is ignored{remedy}"
        )


def check_label_files(dataset: Dataset, classes: Classes) -> None:
    """Look at the first label file of a dataset and at some others, as the dataset's pipeline reads them.

    Datasets without label files, or whose pipeline reads them by other means than MMSegmentation's
    `LoadAnnotations`, are left alone.

    Args:
        dataset: as MMEngine builds it; those inside wrappers are looked at one by one.
        classes: what the model or the metric takes.

    Raises:
        LabelFileError: a file that is missing, of another size than its image, in colours, with numbers that
            MMSegmentation would cut to 8 bits, or with labels that are no classes.
        OneClassError: all files have one class alone, or none.
    """
    readers = [LabelReader(leaf) for leaf in leaf_datasets(dataset) if reads_label_files(leaf)]
    found: set[int] = set()
    for reader in readers:
        sample = np.linspace(0, len(reader) - 1, SAMPLE).astype(int)
        for index in np.unique(sample).tolist():
            found |= classes.found_in(reader.labels(index), reader.path(index))
    # Most images may be without a rare class: before that is an error, look at all others.
    files = [(reader, index) for reader in readers for index in range(len(reader))]
    enough = min(2, classes.count)
    for reader, index in tqdm(files, "looking for a second class", unit="image", delay=2):
        if len(found) >= enough:
            return
        found |= classes.found_in(reader.labels(index), reader.path(index))
    if files and len(found) < enough:
        what = nothing_to_learn(readers[0], found, classes)
        raise OneClassError(f"{len(files)} label files (`{readers[0].path(0)}`, ...) {what}")


def nothing_to_learn(reader: LabelReader, found: set[int], classes: Classes) -> str:
    """What is wrong with labels of fewer than two classes."""
    if not found:
        return f"have no class in any pixel: all is {classes.ignored}, which is ignored"
    only = f"have class {min(found)} alone"
    values = set(np.unique(reader.labels(0)).tolist())
    if values <= {0, IGNORED} and classes.ignored == IGNORED:
        return f"{only}, because {IGNORED} is ignored: {DIVIDE}"
    return only


def read_grey_labels(dataset: Dataset) -> None:
    """Let the pipelines of a dataset read label files of three equal channels, in place.

    It comes behind steps of one's own, which may make class indices of colours.
    """
    for leaf in leaf_datasets(dataset):
        if reads_label_files(leaf):
            steps = leaf.pipeline.transforms
            is_packed = steps[-1] is not label_step_of(leaf.pipeline)
            steps.insert(len(steps) - is_packed, GreyLabels())


def reads_label_files(dataset: Dataset) -> bool:
    """True for a dataset of images with label files, whose pipeline reads them as MMSegmentation does."""
    if label_step_of(getattr(dataset, "pipeline", None)) is None or not len(dataset):
        return False
    return "seg_map_path" in dataset.get_data_info(0)


def label_step_of(pipeline: Any) -> Any:
    """The step of a pipeline that is MMSegmentation's `LoadAnnotations`, or derived from it; else None."""
    for step in pipeline_steps(pipeline):
        bases = [(base.__module__.partition(".")[0], base.__name__) for base in type(step).__mro__]
        if ("mmseg", "LoadAnnotations") in bases:
            return step
    return None


class LabelReader:
    """Reads a dataset's label files one by one by the steps of its pipeline, without augmentations.

    Where the pipeline has steps from outside OpenMMLab, they may change labels: what arrives behind them
    counts.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.image_step = find_step(dataset.pipeline, LoadImageFromFile)
        self.label_step = label_step_of(dataset.pipeline)
        self.map_step = find_step(dataset.pipeline, MapLabels)
        libraries = {type(step).__module__.partition(".")[0] for step in pipeline_steps(dataset.pipeline)}
        self.has_own_steps = not libraries <= set(KNOWN)

    def __len__(self) -> int:
        return len(self.dataset)

    def path(self, index: int) -> str:
        """Path of an image's label file."""
        return self.dataset.get_data_info(index)["seg_map_path"]

    def labels(self, index: int) -> Int[np.ndarray, "height width"]:
        """An image's labels as the model gets them; LabelFileError if they are not what the file has."""
        info = self.dataset.get_data_info(index)
        path = info["seg_map_path"]
        if self.image_step is not None:
            with suppress(Exception):  # an image that cannot be decoded is the loader's to name
                info = self.image_step(info) or info
        labels = self._read(info)
        require_size(labels, info, path)
        file = self.open(path)
        if file is not None and type(self.label_step).__module__.startswith("mmseg."):
            require_eight_bits(file, path)
        if self.has_own_steps:
            return self._arrived(index, path)
        if file is not None:
            require_indices(file, labels, path)
        if self.map_step is not None:
            return self.map_step.indices(labels, path)
        return one_channel(labels, path)

    def _read(self, info: dict[str, Any]) -> Shaped[np.ndarray, "height width *channel"]:
        path = info["seg_map_path"]
        try:
            return self.label_step(info)["gt_seg_map"]
        except FileNotFoundError:
            raise LabelFileError(
                f"label file `{path}` of image `{info.get('img_path')}` is missing: add it, or correct "
                "`seg_map_path`, `img_suffix` and `seg_map_suffix` of the dataset"
            ) from None
        except Exception as error:
            raise LabelFileError(f"label file `{path}` cannot be read: {reason_of(error)}") from error

    def _arrived(self, index: int, path: str) -> Shaped[np.ndarray, "height width"]:
        try:
            with own_randomness():
                sample = self.dataset[index]
        except Exception as error:
            raise LabelFileError(
                f"the pipeline cannot read `{path}` and its image: {reason_of(error)}"
            ) from error
        return arrived_labels(sample, path)

    def open(self, path: str) -> Image.Image | None:
        """A label file as Pillow reads it; None if only another reader knows its format."""
        content = fileio.get(path, backend_args=self.label_step.backend_args)
        white = look_at(io.BytesIO(content)).white
        if white < 255 and self.label_step.imdecode_backend == "pillow":
            raise LabelFileError(
                f"label file `{path}` says that {white} is white, and Pillow stretches its labels to 255: "
                "save it as PNG"
            )
        try:
            return Image.open(io.BytesIO(content))
        except UnidentifiedImageError:
            return None


def require_eight_bits(file: Image.Image, path: str) -> None:
    """Raise LabelFileError for numbers that MMSegmentation would cut to other ones."""
    if file.mode in EIGHT_BITS:
        return
    numbers = np.asarray(file)
    if np.any(numbers != numbers.astype(np.uint8)):
        raise LabelFileError(
            f"label file `{path}` has numbers from {numbers.min()} to {numbers.max()}, which MMSegmentation "
            "cuts to 8 bits: write class indices of 0 to 254, and 255 for ignored"
        )


def require_indices(
    file: Image.Image, labels: Shaped[np.ndarray, "height width *channel"], path: str
) -> None:
    """Raise LabelFileError for a file of which no reader, or not the config's, makes class indices."""
    if file.format == "JPEG":
        raise LabelFileError(f"label file `{path}` is a JPEG, which changes labels: save it as PNG")
    if file.mode == "P" and labels.ndim == 3:
        raise LabelFileError(
            f"label file `{path}` has a palette, of which `imdecode_backend='cv2'` makes colours: "
            "`imdecode_backend='pillow'` in LoadAnnotations reads the indices"
        )


def require_size(
    labels: Shaped[np.ndarray, "height width *channel"], info: Mapping[str, Any], path: str
) -> None:
    """Raise LabelFileError for labels of another size than their image's file."""
    image_size = tuple(info.get("ori_shape", labels.shape)[:2])
    if labels.shape[:2] != image_size:
        height, width = labels.shape[:2]
        raise LabelFileError(
            f"label file `{path}` has {height} x {width} pixels and its image `{info.get('img_path')}` "
            f"{image_size[0]} x {image_size[1]} (height x width): label each pixel of the image"
        )


def arrived_labels(sample: Mapping[str, Any], path: str) -> Shaped[np.ndarray, "height width"]:
    """Labels at the end of a pipeline, of the file at `path`."""
    labels = sample["data_samples"].gt_sem_seg.data.numpy()
    return labels[0] if len(labels) == 1 else one_channel(labels, path)
