"""Batches of images with stored token grids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from mmpretrain.models import SelfSupDataPreprocessor
from mmpretrain.structures import DataSample
from torch import Tensor

from mapet_mm.registry import MODELS


@MODELS.register_module()
class TokenGridDataPreprocessor(SelfSupDataPreprocessor):
    """Normalise images and hand on `[images (B, 3, H, W), token_grids (B, h, w) int64]`.

    MaPeT, and MMPretrain's BEiT and CAE, take the second as the target generator's input. Arguments are
    MMPretrain's `SelfSupDataPreprocessor`'s. Outside of training, a batch without any token grid becomes
    images alone, which `extract_feat` takes: MMPretrain's `FeatureExtractor` gives such batches.

    Raises:
        ValueError: a sample has no token grid, or grids of one batch differ in shape.
    """

    def forward(self, data: dict, training: bool = False) -> dict:
        """Preprocess a batch `dict(inputs=images, data_samples=[...])`, whichever way it was collated."""
        data = super().forward({**data, "inputs": _stack_images(data["inputs"])}, training)
        if not training and not any("token_grid" in sample for sample in data["data_samples"] or ()):
            return data
        token_grids = _stack_grids(data["data_samples"]).to(data["inputs"].device, non_blocking=True)
        return {**data, "inputs": [data["inputs"], token_grids]}


def _stack_images(images: Tensor | Sequence[Tensor]) -> Tensor:
    """One `(B, 3, H, W)` tensor: MMEngine's default collate function leaves the images a list."""
    if isinstance(images, Tensor):
        return images
    if any(image.ndim != 3 for image in images):
        raise ValueError("TokenGridDataPreprocessor takes one view of each image, got several")
    if len({image.shape for image in images}) > 1:
        raise ValueError(
            f"images of one batch differ in shape: {sorted({tuple(image.shape) for image in images})}; "
            "resize or crop them to one size in the pipeline"
        )
    return torch.stack(list(images))


def _stack_grids(data_samples: Sequence[DataSample] | None) -> Int[Tensor, "batch height width"]:
    grids = [np.asarray(sample.get("token_grid")) for sample in data_samples or ()]
    if not grids or any(grid.ndim != 2 for grid in grids):
        raise ValueError(
            "the batch has samples without token_grid: put LoadTokenGrid in the pipeline and "
            "algorithm_keys=['token_grid'] in its PackInputs"
        )
    if len({grid.shape for grid in grids}) > 1:
        raise ValueError(
            f"token grids of one batch differ in shape: {sorted({grid.shape for grid in grids})}; "
            "crop all images to one size"
        )
    # One transfer for the batch.
    return torch.from_numpy(np.stack(grids).astype(np.int64))
