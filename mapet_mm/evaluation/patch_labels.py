"""Labels of pixels and of patches: what each patch of a grid covers of an image's labels, and back."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8

from mapet_mm.utils.errors import UserError

IGNORED = 255


def label_cells(
    labels: Int[np.ndarray, "height width"], grid: tuple[int, int], side: int
) -> UInt8[np.ndarray, "patch pixel"]:
    """What each patch of the grid covers, as `side` x `side` labels taken from the image's own size.

    The grid covers the whole image, whatever its size: a model that takes squares sees it squashed.

    Args:
        labels: `(h, w)`, class indices and 255, ignored.
        grid: patches by rows and columns, `(H, W)`.
        side: labels per side of a patch.

    Returns:
        `(H W, side side)` uint8, patches in raster order.
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


def _centres(count: int, total: int) -> np.ndarray:
    """The indices, of `total`, below the middles of `count` equal parts."""
    return ((np.arange(count) + 0.5) * total / count).astype(np.int64)


def majority(cells: UInt8[np.ndarray, "patch pixel"], num_classes: int) -> UInt8[np.ndarray, " patch"]:
    """The most frequent label of each patch, the lower of equals; 255 where most of it is ignored."""
    codes = np.where(cells == IGNORED, num_classes, cells).astype(np.int64)
    codes += (num_classes + 1) * np.arange(len(cells))[:, None]
    best = (
        np.bincount(codes.ravel(), minlength=len(cells) * (num_classes + 1)).reshape(len(cells), -1).argmax(1)
    )
    return np.where(best == num_classes, IGNORED, best).astype(np.uint8)


def check_labels(labels: Int[np.ndarray, "height width"], num_classes: int, name: str) -> None:
    """Refuse labels of classes that there are not.

    Raises:
        UserError: a label is neither one of `0 .. num_classes - 1` nor 255.
    """
    wrong = labels[(labels >= num_classes) & (labels != IGNORED)]
    if wrong.size or labels.min() < 0:
        raise UserError(
            f"label {int(wrong.max() if wrong.size else labels.min())} in the labels of `{name}`: the "
            f"dataset has the classes 0 to {num_classes - 1}, and 255 is ignored; if its files count from 1 "
            "and 0 means unlabelled, give the dataset `reduce_zero_label=True`"
        )


def check_classes(found: Collection[int], classes: Sequence[str]) -> None:
    """Refuse labels that leave nothing to tell apart.

    Args:
        found: the classes of the training patches' pixels.
        classes: names of all.

    Raises:
        UserError: fewer than two classes are there.
    """
    if len(found) < 2:
        what = f"one class only, `{classes[min(found)]}`" if found else "ignored pixels only (255)"
        raise UserError(
            f"the patches of the labelled training images have {what}: segmentation needs two classes, so "
            "give more images, or look at the dataset's `reduce_zero_label`"
        )


class Areas:
    """Areas of all images by class, and the mean IoU of MMSegmentation's `IoUMetric`."""

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.sums = torch.zeros(4, num_classes, dtype=torch.float64)

    def add(
        self, predicted: Int[np.ndarray, "height width"], labels: Int[np.ndarray, "height width"]
    ) -> None:
        """Count an image's pixels."""
        from mmseg.evaluation import IoUMetric

        both = (torch.from_numpy(each.astype(np.int64)) for each in (predicted, labels))
        self.sums += torch.stack(IoUMetric.intersect_and_union(*both, self.num_classes, IGNORED))

    @property
    def ious(self) -> Float[np.ndarray, " classes"]:
        """IoU of each class in percent; NaN where it is neither in the labels nor predicted."""
        from mmseg.evaluation import IoUMetric

        return 100 * np.asarray(IoUMetric.total_area_to_metrics(*self.sums)["IoU"])

    @property
    def miou(self) -> float:
        """The classes' mean IoU in percent, of those that are there; NaN if none is."""
        found = self.ious[~np.isnan(self.ious)]
        return float(found.mean()) if found.size else float("nan")
