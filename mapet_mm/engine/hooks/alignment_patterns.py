"""Probe images: patterns in which every patch can be found again, whatever was done to the colours."""

from __future__ import annotations

from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from jaxtyping import Float32, Int, Shaped, UInt8
from PIL import Image
from torch import Tensor

# Two grey levels that stay apart under inversion, solarisation at any threshold, and posterisation.
LEVELS = (60, 220)
# Pixels per side to which every patch is brought for the comparison.
PATCH = 8
# A quarter of a patch in eight directions, and last no shift: of equal matches the first counts.
SHIFTS = [(y, x) for y in (-2, 0, 2) for x in (-2, 0, 2) if (y, x) != (0, 0)] + [(0, 0)]


class Probe(NamedTuple):
    """An image to send through a pipeline, and what its tokens stand for, if that is known before."""

    image: UInt8[np.ndarray, "height width"]
    views: Float32[np.ndarray, "orientation shift basis patch pixel"] | None


def pattern(size: tuple[int, int], patch: float) -> UInt8[np.ndarray, "height width"]:
    """Blobs of two grey levels, the same for the same size, a half and one and a half patches wide.

    Args:
        size: (H, W) of the image.
        patch: pixels per side that a token stands for; the small blobs tell patches apart, the large ones
            survive blurring.
    """
    rng = np.random.default_rng(0)
    total = np.zeros(size, np.float32)
    for cells in (0.5, 1.5):
        rows, columns = (int(side / (cells * patch)) + 2 for side in size)
        noise = rng.standard_normal((rows, columns)).astype(np.float32)
        total += cv2.resize(noise, size[::-1], interpolation=cv2.INTER_CUBIC)
    return np.where(total > np.median(total), LEVELS[1], LEVELS[0]).astype(np.uint8)


def views_of(
    image: Shaped[np.ndarray, "height width"], grid: tuple[int, int]
) -> Float32[np.ndarray, "orientation shift basis patch pixel"]:
    """The patches of the tokenizer's view in four orientations, shifted by a quarter of a patch.

    Mirrored patches are those of an image that was mirrored together with its tokens. The two bases of a
    patch are its grey levels and their distance from the middle one, orthonormal.
    """
    small = _resize(image, grid)
    bases = small, np.abs(small - (small.min() + small.max()) / 2)
    shifted = [[_patches(np.roll(basis, shift, (0, 1)), grid) for basis in bases] for shift in SHIFTS]
    turned = np.stack([np.asarray(shifted)[..., ::y, ::x] for y in (1, -1) for x in (1, -1)])
    views = _normalised(turned.reshape(*turned.shape[:-2], -1))[0]
    levels, folded = views[:, :, 0], views[:, :, 1]
    folded = folded - (folded * levels).sum(-1, keepdims=True) * levels
    return np.stack([levels, _normalised(folded)[0]], axis=2)


def matching_share(
    image: Shaped[np.ndarray, "height width"],
    ids: Int[np.ndarray, "rows columns"],
    views: Float32[np.ndarray, "orientation shift basis patch pixel"],
) -> float | None:
    """Share of an image's patches that show what their ids stand for; None if too few can be read.

    A patch matches where no shift of the tokenizer's view explains more of it. Inverted and solarised patches
    match as well: it is explained by two bases.

    Args:
        image: what arrived, of any size.
        ids: what arrived as its token grid: for each patch the number of one of the views' patches.
        views: patches of `views_of`.
    """
    patches = _patches(_resize(image, ids.shape), ids.shape).reshape(ids.size, PATCH * PATCH)
    patches, contrast = _normalised(patches)
    readable = contrast > 0.1 * max(contrast.max(), 1e-6)
    if readable.mean() < 0.25:
        return None
    shares = []
    for view in views:
        explained = (np.einsum("sbnp,np->sbn", view[:, :, ids.ravel()], patches) ** 2).sum(axis=1)
        shares.append(float((explained[:, readable].argmax(axis=0) == len(SHIFTS) - 1).mean()))
        if shares[-1] > 0.5:
            break
    return max(shares)


def take_the_place(image: Any, probe: UInt8[np.ndarray, "height width"]) -> Any:
    """A probe as the kind of image that a pipeline reads: PIL's, an array or a tensor (C, H, W).

    Raises:
        TypeError: the image is of none of these kinds.
    """
    if isinstance(image, Image.Image):
        return Image.fromarray(probe).convert(image.mode)
    if not isinstance(image, np.ndarray | Tensor):
        raise TypeError(f"the pipeline reads images as {type(image).__name__}")
    values = np.asarray(image)
    unit = np.issubdtype(values.dtype, np.floating) and values.max() <= 1
    taken = (probe / 255 if unit else probe).astype(values.dtype)
    if isinstance(image, Tensor):
        return torch.from_numpy(taken).expand(*image.shape[:-2], *taken.shape).clone()
    return taken if image.ndim == 2 else np.repeat(taken[..., None], image.shape[2], axis=2)


def grey(image: Any) -> Float32[np.ndarray, "height width"]:
    """The mean of an image's channels: of PIL's, an array (H, W, C) or a tensor (C, H, W)."""
    values = np.asarray(image.cpu() if isinstance(image, Tensor) else image, dtype=np.float32)
    if values.ndim == 3:
        values = values.mean(axis=0 if isinstance(image, Tensor) else 2)
    return values


def _resize(image: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """An image in float32 with PATCH x PATCH pixels for each patch of the grid."""
    rows, columns = grid
    shrinks = image.shape[0] > rows * PATCH
    interpolation = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    return cv2.resize(image.astype(np.float32), (columns * PATCH, rows * PATCH), interpolation=interpolation)


def _patches(image: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    rows, columns = grid
    split = image.reshape(rows, PATCH, columns, PATCH).transpose(0, 2, 1, 3)
    return split.reshape(rows * columns, PATCH, PATCH)


def _normalised(patches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Patches (..., pixel) without mean and of length 1, and their lengths before."""
    patches = patches - patches.mean(axis=-1, keepdims=True)
    length = np.linalg.norm(patches, axis=-1, keepdims=True)
    return (patches / np.maximum(length, 1e-6)).astype(np.float32), length[..., 0]
