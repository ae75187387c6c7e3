"""Labels of pixels: read from a data set, cut into the patches of a grid and back, and compared."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int, Int64, UInt8
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from mapet_mm.datasets.label_files import IGNORED, Classes, arrived_labels
from mapet_mm.evaluation.images import ImageSet, ImageSetError
from mapet_mm.evaluation.tables import bootstrap
from mapet_mm.utils.loader_workers import tensor_bytes, usable_workers

if TYPE_CHECKING:
    from mmseg.structures import SegDataSample


def label_cells(
    labels: Int[np.ndarray, "height width"], grid: tuple[int, int], side: int
) -> UInt8[np.ndarray, "patch pixel"]:
    """The `side` x `side` labels that each patch of the grid covers, taken from the image's own size.

    The grid covers the whole image, whatever its size: a model that takes squares sees it squashed. Labels
    are class indices and 255, ignored; patches come in raster order.
    """
    height, width = (count * side for count in grid)
    sampled = labels[_centres(height, labels.shape[0])[:, None], _centres(width, labels.shape[1])]
    cells = sampled.reshape(grid[0], side, grid[1], side).transpose(0, 2, 1, 3)  # H W side side
    return np.ascontiguousarray(cells.reshape(grid[0] * grid[1], side * side), np.uint8)


def join_cells(
    cells: UInt8[np.ndarray, "patch pixel"], grid: tuple[int, int], size: tuple[int, int]
) -> UInt8[np.ndarray, "height width"]:
    """Labels of patches `(H W, side side)` put together and brought to an image's size `(h, w)`."""
    side = round(cells.shape[1] ** 0.5)
    joined = cells.reshape(*grid, side, side).transpose(0, 2, 1, 3).reshape(grid[0] * side, grid[1] * side)
    return joined[_centres(size[0], joined.shape[0])[:, None], _centres(size[1], joined.shape[1])]


def _centres(count: int, total: int) -> Int64[np.ndarray, " count"]:
    """The indices, out of `total`, below the middles of `count` equal parts."""
    return ((np.arange(count) + 0.5) * total / count).astype(np.int64)


def majority(cells: UInt8[np.ndarray, "patch pixel"], num_classes: int) -> UInt8[np.ndarray, " patch"]:
    """The most frequent label of each patch, the lower of equals; 255 where most of it is ignored."""
    codes = np.where(cells == IGNORED, num_classes, cells).astype(np.int64)
    codes += (num_classes + 1) * np.arange(len(cells))[:, None]
    counts = np.bincount(codes.ravel(), minlength=len(cells) * (num_classes + 1))
    best = counts.reshape(len(cells), -1).argmax(1)
    return np.where(best == num_classes, IGNORED, best).astype(np.uint8)


class Areas:
    """Areas of each image by class, and the mean IoU of MMSegmentation's `IoUMetric`."""

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self._images: list[Float[np.ndarray, "2 classes"]] = []  # of intersections and unions

    def add(
        self, predicted: Int[np.ndarray, "height width"], labels: Int[np.ndarray, "height width"]
    ) -> None:
        """Count an image's pixels."""
        from mmseg.evaluation import IoUMetric

        predicted = torch.from_numpy(predicted.astype(np.int64))
        labels = torch.from_numpy(labels.astype(np.int64))
        intersection, union, *_ = IoUMetric.intersect_and_union(predicted, labels, self.num_classes, IGNORED)
        self._images.append(torch.stack([intersection, union]).double().numpy())

    @property
    def ious(self) -> Float[np.ndarray, " classes"]:
        """IoU of each class in percent; NaN where it is neither in the labels nor predicted."""
        return _ious(np.sum(self._images, axis=0)) if self._images else np.full(self.num_classes, np.nan)

    @property
    def miou(self) -> float:
        """Mean IoU in percent of the classes that occur; NaN if no pixel is labelled."""
        return _mean(self.ious)

    @property
    def interval(self) -> tuple[float, float]:
        """The mean IoU's 95 % interval over draws of images."""
        return bootstrap(lambda areas: _mean(_ious(areas.sum(0))), np.stack(self._images))


def _ious(areas: Float[np.ndarray, "2 classes"]) -> Float[np.ndarray, " classes"]:
    with np.errstate(invalid="ignore"):
        return 100 * areas[0] / areas[1]


def _mean(ious: Float[np.ndarray, " classes"]) -> float:
    found = ious[~np.isnan(ious)]
    return float(found.mean()) if found.size else float("nan")


class PixelLabels(Sequence):
    """Pixel labels of an image set at each image's own size, read once and kept compressed.

    Args:
        images: a dataset of MMSegmentation whose pipeline loads annotations.

    Raises:
        LabelFileError: a label of a class that the dataset does not have.
        ImageSetError: labels of another part of the image than the model sees.
    """

    def __init__(self, images: ImageSet) -> None:
        read = partial(read_labels, images)
        num_workers = usable_workers(images.useful_workers(len(images)), lambda: tensor_bytes(read(0)))
        # The loader's own dataset are the numbers of the images.
        loader = DataLoader(range(len(images)), batch_size=None, num_workers=num_workers, collate_fn=read)
        bar = tqdm(loader, desc=f"labels of {images.name}", unit="image")
        self._maps = [(labels.shape, zlib.compress(labels.numpy().tobytes(), 1)) for labels in bar]

    def __len__(self) -> int:
        return len(self._maps)

    def __getitem__(self, index: int) -> UInt8[np.ndarray, "height width"]:
        shape, data = self._maps[index]
        return np.frombuffer(zlib.decompress(data), np.uint8).reshape(shape)


@lru_cache(maxsize=2)
def pixel_labels(images: ImageSet) -> PixelLabels:
    """The pixel labels of an image set, read once for all models: sets of the same images are equal."""
    return PixelLabels(images)


def read_labels(images: ImageSet, index: int) -> UInt8[Tensor, "height width"]:
    """The pixel labels of an image."""
    sample = images[index]
    image_path = images.path(index)
    path = sample["data_samples"].get("seg_map_path", image_path)
    labels = arrived_labels(sample, path)
    classes_of(images).found_in(labels, path)
    check_whole(labels, sample["data_samples"], image_path)
    return torch.from_numpy(labels).byte()


def classes_of(images: ImageSet) -> Classes:
    """The labels that an image set's names of classes have a place for."""
    is_reduced = getattr(images.dataset, "reduce_zero_label", False)
    return Classes(min(len(images.class_names), IGNORED), reduce_zero_label=is_reduced)


def check_whole(labels: Int[np.ndarray, "height width"], sample: SegDataSample, path: str) -> None:
    """Raise ImageSetError for labels of another part of the image than the model sees."""
    if tuple(labels.shape) == tuple(sample.img_shape):
        return
    scale = sample.get("scale_factor", (1, 1))  # of width and height
    seen = (round(sample.img_shape[0] / scale[1]), round(sample.img_shape[1] / scale[0]))
    if abs(seen[0] - labels.shape[0]) > 1 or abs(seen[1] - labels.shape[1]) > 1:
        raise ImageSetError(
            f"the model sees {seen[0]} x {seen[1]} pixels of `{path}`, its labels have "
            f"{labels.shape[0]} x {labels.shape[1]}: resize without crop or padding "
            "(`keep_ratio=False`), and load the annotations after that"
        )
