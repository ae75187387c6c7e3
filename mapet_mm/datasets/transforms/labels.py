"""Steps of a pipeline that make class indices of the values in label files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Shaped
from mmcv.transforms import BaseTransform

from mapet_mm.registry import TRANSFORMS
from mapet_mm.utils.errors import UserError

IGNORED = 255


class LabelFileError(UserError, ValueError):
    """A label file is not what the model would learn from, or be measured by."""


class GreyLabels:
    """A pipeline's step: labels of three equal channels, as some programs save grey images, get one."""

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        if "gt_seg_map" in results:
            results["gt_seg_map"] = one_channel(results["gt_seg_map"], results["seg_map_path"])
        return results


@TRANSFORMS.register_module()
class MapLabels(BaseTransform):
    """Number the classes of label files whose values are not 0, 1, 2, ...; after `LoadAnnotations`.

    Label files may have one channel or three equal ones.

    Args:
        values: the value of each class, in the order of the class names.
        ignored: values that are not labelled; they become 255.

    Raises:
        LabelFileError: a file has another value, or colours.

    Examples:
        >>> labels = dict(gt_seg_map=np.array([[0, 128, 255]], np.uint8), seg_map_path="a.png")
        >>> MapLabels(values=[0, 255], ignored=[128])(labels)["gt_seg_map"]
        array([[  0, 255,   1]], dtype=uint8)
    """

    def __init__(self, values: Sequence[int], ignored: Sequence[int] = (IGNORED,)) -> None:
        self.values = list(values)
        self.ignored = list(ignored)
        self._class_of = np.full(256, -1, np.int16)
        self._class_of[self.ignored] = IGNORED
        self._class_of[self.values] = np.arange(len(self.values))

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        """Replace the labels of a sample."""
        results["gt_seg_map"] = self.indices(results["gt_seg_map"], results["seg_map_path"])
        return results

    def indices(
        self, labels: Shaped[np.ndarray, "height width *channel"], path: str
    ) -> Shaped[np.ndarray, "height width"]:
        """The class indices of a file's values."""
        labels = one_channel(labels, path)
        found = self._class_of[labels]
        if np.any(found < 0):
            unknown = np.unique(labels[found < 0]).tolist()
            raise LabelFileError(
                f"label file `{path}` has the values {unknown}: classes are {self.values}, ignored "
                f"{self.ignored}"
            )
        return found.astype(np.uint8)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(values={self.values}, ignored={self.ignored})"


def one_channel(
    labels: Shaped[np.ndarray, "height width *channel"], path: str
) -> Shaped[np.ndarray, "height width"]:
    """Labels without channels: three equal ones are grey; LabelFileError for colours."""
    if labels.ndim == 2:
        return labels
    channels = labels.shape[2]
    if channels == 3 and np.all(labels == labels[..., :1]):
        return labels[..., 0]
    kind = "colours" if channels == 3 else f"{channels} channels"
    raise LabelFileError(
        f"label file `{path}` has {kind}: save a class index of each pixel (one channel, or a palette)"
    )
