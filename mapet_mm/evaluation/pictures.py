"""What pictures of patch features show: principal components as colours, and similarity to one patch."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor
from torch.nn import functional as F

# Of the foreground's values on each component, the shares at the ends that take the same colour.
CLIPPED = 0.02
# Below this share of the patches, or above the rest, what was found is no foreground.
FOREGROUND_SHARE = 0.03
BACKGROUND_COLOUR = (38, 38, 46)


def foreground(tokens: Float[Tensor, "image row column dim"]) -> Bool[Tensor, "image row column"]:
    """The patches on the far side of the first principal component, fitted over all images.

    The component is cut where it falls into two groups (Otsu's threshold); the group that has less of the
    images' borders is the foreground. All patches, if the other group is hardly there.
    """
    scores = _components(tokens.flatten(0, 2).float(), 1)[:, 0].view(tokens.shape[:3])
    far = scores > otsu_threshold(scores.flatten().numpy())
    border = torch.ones(tokens.shape[1:3], dtype=torch.bool)
    border[1:-1, 1:-1] = False
    if far[:, border].float().mean() > far.float().mean():
        far = ~far
    share = far.float().mean()
    return far if FOREGROUND_SHARE < share < 1 - FOREGROUND_SHARE else torch.ones_like(far)


def otsu_threshold(values: Float[np.ndarray, " value"]) -> float:
    """The threshold between two groups of values with the most variance between the groups' means.

    The value itself, where there is one only.
    """
    if np.ptp(values) == 0:
        return float(values[0])
    counts, edges = np.histogram(values, bins=256)
    middles = (edges[:-1] + edges[1:]) / 2
    below = np.cumsum(counts)[:-1]
    above = counts.sum() - below
    sums = np.cumsum(counts * middles)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = sums[:-1] / below, (sums[-1] - sums[:-1]) / above
        between = below * above * (means[0] - means[1]) ** 2
    return float(edges[1:-1][np.nanargmax(between)])


def component_colours(
    tokens: Float[Tensor, "image row column dim"], shown: Bool[Tensor, "image row column"]
) -> UInt8[np.ndarray, "image row column 3"]:
    """The foreground's first three principal components as red, green and blue, fitted over all images.

    Args:
        tokens: patch tokens of some images.
        shown: their foreground; other patches are dark.
    """
    scores = _components(tokens[shown].float(), 3)
    low, high = (scores.quantile(share, dim=0) for share in (CLIPPED, 1 - CLIPPED))
    colours = torch.tensor(BACKGROUND_COLOUR, dtype=torch.uint8).expand(*shown.shape, 3).clone()
    colours[shown] = (255 * ((scores - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)).round().byte()
    return colours.numpy()


def _components(rows: Float[Tensor, "row dim"], count: int) -> Float[Tensor, "row component"]:
    """Rows on their first principal components, at unit variance; zeros where there are fewer."""
    centred = rows - rows.mean(0)
    _, _, axes = torch.linalg.svd(centred.T @ centred)
    scores = centred @ axes[:count].T
    # The sign of a component is free: its longer tail is made positive, so that pictures come out the same.
    scores = scores * scores.pow(3).sum(0).sign()
    return F.pad(scores / scores.std(0, correction=0).clamp(min=1e-12), (0, count - scores.shape[1]))


def patch_similarity(
    tokens: Float[Tensor, "image row column dim"], image: int, row: int, column: int
) -> Float[Tensor, "image row column"]:
    """Cosine similarity of every patch to one of them."""
    directions = F.normalize(tokens.float(), dim=-1)
    return directions @ directions[image, row, column]


def chosen_patch(image: UInt8[np.ndarray, "height width 3"], grid: tuple[int, int]) -> tuple[int, int]:
    """A patch to compare others with: one of much contrast near the middle, the same for every model."""
    grey = image.astype(np.float32).mean(-1)
    bands = (np.array_split(band, grid[1], axis=1) for band in np.array_split(grey, grid[0]))
    contrast = np.array([[patch.std() for patch in band] for band in bands])
    rows, columns = (np.linspace(-1, 1, count + 2)[1:-1] for count in grid)
    row, column = np.unravel_index((contrast * np.outer(1 - rows**2, 1 - columns**2)).argmax(), grid)
    return int(row), int(column)
