"""Batches of images with a second view, for a tokenizer that runs inside the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mmpretrain.models import SelfSupDataPreprocessor, TwoNormDataPreprocessor
from torch import Tensor

from mapet_mm.models.utils.pixel_range import check_images_of
from mapet_mm.registry import MODELS


@MODELS.register_module()
class TwoViewDataPreprocessor(TwoNormDataPreprocessor):
    """MMPretrain's `TwoNormDataPreprocessor`, extended for extracting features with a pre-trained model.

    Outside training, images with one view are normalised and returned as `(B, 3, H, W)`, and two views as a
    list with the `shape` of the first, which MMPretrain's `FeatureExtractor` reads. Arguments are those of
    `TwoNormDataPreprocessor`.

    Raises:
        ValueError: the images of a training batch have one view only.
        PixelRangeError: the first images' values are from 0 to 1, and the means and deviations for 0 to 255,
            or the other way round.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._range_checked = False

    def forward(self, data: dict, training: bool = False) -> dict:
        """Preprocess `dict(inputs=[view, view] or images, data_samples=[...])`, collated in any way."""
        data = {**data, "inputs": _stacked(data["inputs"])}
        if isinstance(data["inputs"], torch.Tensor):
            if training:
                raise ValueError("the tokenizer gets no view of the images: put MultiView in the pipeline")
            return SelfSupDataPreprocessor.forward(self, data, training)
        if not self._range_checked:  # the first images stand for all
            for view, prefix in zip(data["inputs"], ("", "second_"), strict=False):
                check_images_of(self, view, prefix)
            self._range_checked = True
        data = super().forward(data, training)
        return data if training else {**data, "inputs": _Views(data["inputs"])}


def _stacked(inputs: Tensor | Sequence[Tensor | Sequence[Tensor]]) -> Tensor | list[Tensor]:
    """The images, or the views of them, in one tensor each; MMEngine's own loaders leave them in lists."""
    if isinstance(inputs, Tensor):
        return inputs
    if isinstance(inputs[0], Tensor) and inputs[0].ndim == 3:  # one view of each image
        return torch.stack(list(inputs))
    return [view if isinstance(view, Tensor) else torch.stack(list(view)) for view in inputs]


class _Views(list):
    @property
    def shape(self) -> torch.Size:
        return self[0].shape
