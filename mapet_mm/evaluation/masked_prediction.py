"""What a pre-training model predicts for masked images, and patches that stand for tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from mmengine.config import Config
from torch import Tensor

from mapet_mm.datasets.transforms.token_grid import LoadTokenGrid
from mapet_mm.evaluation.label_free import prediction_entropy
from mapet_mm.models.selfsup.mapet import MaPeT
from mapet_mm.registry import TRANSFORMS
from mapet_mm.utils.config import nodes, type_name

UNKNOWN_COLOUR = (214, 90, 160)  # of a token that no patch stands for


class Prediction(NamedTuple):
    """Predicted tokens of images `B`, targets `n` in the order of their prediction.

    Args:
        places: `(B, n)`, the patch of each target, in raster order.
        tokens: `(B, n)`, the most likely token.
        entropy: `(B, n)`, of the predicted distribution, in bits.
        one_by_one: whether a target is predicted knowing the content of those before it.
    """

    places: Int64[Tensor, "batch target"]
    tokens: Int64[Tensor, "batch target"]
    entropy: Float[Tensor, "batch target"]
    one_by_one: bool


@torch.no_grad()
def predict_tokens(model: MaPeT, images: Float[Tensor, "batch 3 height width"]) -> Prediction:
    """Predict normalised images' targets, behind the permutation that each image has in validation."""
    permutation = model.validation_permutation(images)
    latents, _ = model.backbone(images, permutation)
    logits = model.head(latents)
    return Prediction(
        places=permutation[:, model.backbone.cutting_point :].cpu() - 1,
        tokens=logits.argmax(-1).cpu(),
        entropy=prediction_entropy(logits).cpu(),
        one_by_one="T" in model.backbone.objective.groups,
    )


def token_loader(config: Config) -> LoadTokenGrid | None:
    """The step by which a pre-training's config reads tokens; None if it reads none."""
    for _, node in nodes(config.get("train_dataloader")):
        if isinstance(node, dict) and "type" in node and type_name(node["type"]) == "LoadTokenGrid":
            return TRANSFORMS.build(dict(node))
    return None


def cut_patches(
    images: Sequence[UInt8[np.ndarray, "height width 3"]], grid: tuple[int, int]
) -> UInt8[np.ndarray, "patch row column 3"]:
    """All patches of images of one size, in raster order, one image after the other."""
    stacked = np.stack(images)
    count, height, width, _ = stacked.shape
    rows, columns = grid
    cut = stacked.reshape(count, rows, height // rows, columns, width // columns, 3).swapaxes(2, 3)
    return cut.reshape(count * rows * columns, height // rows, width // columns, 3)


def join_patches(patches: UInt8[np.ndarray, "patch row column 3"], grid: tuple[int, int]) -> np.ndarray:
    """An image of its patches."""
    (rows, columns), (height, width) = grid, patches.shape[1:3]
    joined = patches.reshape(rows, columns, height, width, 3).swapaxes(1, 2)
    return joined.reshape(rows * height, columns * width, 3)


def token_patches(
    patches: UInt8[np.ndarray, "patch row column 3"], tokens: Int64[np.ndarray, " patch"], vocab_size: int
) -> UInt8[np.ndarray, "token row column 3"]:
    """Of each token the patch that is most like the mean of its patches; a plain colour where it has none."""
    found = np.empty((vocab_size, *patches.shape[1:]), np.uint8)
    found[:] = UNKNOWN_COLOUR
    for token in np.unique(tokens):
        own = patches[tokens == token]
        distance = ((own - own.mean(0, dtype=np.float32)) ** 2).sum((1, 2, 3))
        found[token] = own[distance.argmin()]
    return found
