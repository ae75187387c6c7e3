"""Batches of images with stored token grids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from mmpretrain.models import SelfSupDataPreprocessor
from mmpretrain.structures import DataSample
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

    Args:
        non_blocking: do not wait for the copies.
        **kwargs: those of MMPretrain's `SelfSupDataPreprocessor`.

    Raises:
        ValueError: a sample has no token grid, or images, grids or masks of one batch differ in shape.
        PixelRangeError: the first images' values are from 0 to 1, and `mean` and `std` for 0 to 255, or the
            other way round.
    """

    def __init__(self, *args: Any, non_blocking: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, non_blocking=non_blocking, **kwargs)
        self._range_checked = False

    def forward(self, data: dict, training: bool = False) -> dict:
        """Preprocess a batch `dict(inputs=images, data_samples=[...])`, collated in any way."""
        data_samples = data.get("data_samples") or ()
        images = self._send(_one_view(data["inputs"]), "images")
        has_grids = any("token_grid" in sample for sample in data_samples)
        token_grids = self._send(_token_grids(data_samples), "token grids") if training or has_grids else None
        if data_samples and "mask" in data_samples[0] and self.device.type != "cpu":
            masks = self._send([sample.mask for sample in data_samples], "masks")
            for sample, mask in zip(data_samples, masks, strict=True):
                sample.set_mask(mask)
        if not self._range_checked:  # the first images stand for all
            check_images_of(self, images)
            self._range_checked = True
        images = super().forward({"inputs": images, "data_samples": None}, training)["inputs"]
        return {**data, "inputs": images if token_grids is None else [images, token_grids]}

    def _send(self, batch: Tensor | Sequence[Tensor], what: str) -> Tensor:
        """Copy a batch, or the list of its members, to the device in one copy."""
        if not isinstance(batch, Tensor):
            # Stacked in page-locked memory, because only from there GPUs copy asynchronously.
            batch = _stack(batch, what, self.device.type == "cuda")
        return batch.to(self.device, non_blocking=self._non_blocking)


def _stack(members: Sequence[Tensor], what: str, pinned: bool) -> Tensor:
    if len({member.shape for member in members}) > 1:
        raise ValueError(
            f"{what} of one batch differ in shape: {sorted({tuple(member.shape) for member in members})}; "
            "resize or crop all images to one size in the pipeline"
        )
    first = members[0]
    stacked = first.new_empty((len(members), *first.shape), pin_memory=pinned and first.device.type == "cpu")
    return torch.stack(list(members), out=stacked)


def _one_view(images: Tensor | Sequence[Tensor]) -> Tensor | Sequence[Tensor]:
    """Check that images have one view; a list may hold images or, where there are several, views."""
    if not isinstance(images, Tensor) and any(getattr(image, "ndim", None) != 3 for image in images):
        raise ValueError("TokenGridDataPreprocessor takes one view of each image, got several")
    return images


def _token_grids(data_samples: Sequence[DataSample]) -> list[Int[Tensor, "height width"]]:
    grids = [np.asarray(sample.get("token_grid")) for sample in data_samples]
    if not grids or any(grid.ndim != 2 for grid in grids):
        raise ValueError(
            "the batch has samples without token_grid: put LoadTokenGrid in the pipeline and "
            "algorithm_keys=['token_grid'] in its PackInputs"
        )
    return [torch.from_numpy(np.ascontiguousarray(grid, np.int64)) for grid in grids]
