"""Batches for pre-training: images with stored token grids, or with a second view for a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from mmpretrain.models import SelfSupDataPreprocessor, TwoNormDataPreprocessor
from torch import Tensor

from mapet_mm.models.utils.pixel_range import check_images_of
from mapet_mm.registry import MODELS


@MODELS.register_module()
class TokenGridDataPreprocessor(SelfSupDataPreprocessor):
    """Normalise images and return `[images (B, 3, H, W), token_grids (B, h, w) int64]`.

    MaPeT, and MMPretrain's BEiT and CAE, pass the second item to the target generator. Images, grids and, if
    samples have them, masks go to the model's device in one asynchronous copy each. Labels and other data of
    the samples stay in the host's memory. Outside training, a batch without token grids is returned as images
    only, which `extract_feat` takes: MMPretrain's `FeatureExtractor` makes such batches.

    Arguments are as for MMPretrain's `SelfSupDataPreprocessor`.

    Raises:
        ValueError: a sample has no token grid.
        PixelRangeError: the first images' values are from 0 to 1, and `mean` and `std` for 0 to 255, or the
            other way round.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._range_checked = False

    def forward(self, data: dict, training: bool = False) -> dict:
        """Preprocess a batch `dict(inputs=images, data_samples=[...])`, collated in any way."""
        samples = data.get("data_samples") or ()
        images = self._send(data["inputs"])
        if not self._range_checked:  # the first images stand for all
            check_images_of(self, images)
            self._range_checked = True
        if samples and "mask" in samples[0]:
            masks = self._send([torch.as_tensor(sample.mask) for sample in samples])
            for sample, mask in zip(samples, masks, strict=True):
                sample.set_mask(mask)
        grids = [sample.get("token_grid") for sample in samples]
        images = super().forward({"inputs": images, "data_samples": None}, training)["inputs"]
        if not training and all(grid is None for grid in grids):
            return {**data, "inputs": images}
        if not grids or any(grid is None for grid in grids):
            raise ValueError(
                "the batch has samples without token_grid: put LoadTokenGrid in the pipeline and "
                "algorithm_keys=['token_grid'] in its PackInputs"
            )
        grids = self._send([torch.from_numpy(np.asarray(grid, np.int64)) for grid in grids])
        return {**data, "inputs": [images, grids]}

    def _send(self, batch: Tensor | Sequence[Tensor]) -> Tensor:
        """Copy a batch, or the list of its members, to the device in one copy."""
        batch = _stacked(batch)
        if self.device.type == "cuda" and batch.device.type == "cpu":
            batch = batch.pin_memory()  # only from there GPUs copy asynchronously
        return batch.to(self.device, non_blocking=True)


@MODELS.register_module()
class TwoViewDataPreprocessor(TwoNormDataPreprocessor):
    """MMPretrain's `TwoNormDataPreprocessor`, extended for extracting features with a pre-trained model.

    Outside training, images with one view are normalised and returned as `(B, 3, H, W)`, and two views as a
    list with the `shape` of the first, which MMPretrain's `FeatureExtractor` reads. Arguments are as for
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
        inputs = data["inputs"]
        if isinstance(inputs, Tensor) or getattr(inputs[0], "ndim", None) == 3:  # one view of each image
            if training:
                raise ValueError("the tokenizer gets no view of the images: put MultiView in the pipeline")
            return SelfSupDataPreprocessor.forward(self, {**data, "inputs": _stacked(inputs)}, training)
        views = [_stacked(view) for view in inputs]
        if not self._range_checked:  # the first images stand for all
            for view, prefix in zip(views, ("", "second_"), strict=True):
                check_images_of(self, view, prefix)
            self._range_checked = True
        data = super().forward({**data, "inputs": views}, training)
        return data if training else {**data, "inputs": _Views(data["inputs"])}


def _stacked(images: Tensor | Sequence[Tensor]) -> Tensor:
    """One tensor of a batch; MMEngine's own loaders leave its images in a list."""
    return images if isinstance(images, Tensor) else torch.stack(list(images))


class _Views(list):
    @property
    def shape(self) -> torch.Size:
        return self[0].shape
