"""The page's pictures of patch features, attention and neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from mapet_mm.evaluation.masked_prediction import Prediction, cut_patches, join_patches
from mapet_mm.evaluation.picture_grid import (
    FIGURE_INCHES,
    RIGHT,
    WRONG,
    Cell,
    enlarge,
    heat,
    over,
    picture_grid,
)
from mapet_mm.evaluation.pictures import chosen_patch, component_colours, patch_similarity

Pictures = Sequence[UInt8[np.ndarray, "height width 3"]]
COLUMNS = 6
# Patches that the model does not see.
HIDDEN_COLOUR = (226, 226, 232)


def component_figure(
    images: Pictures,
    tokens: Float[Tensor, "image row column dim"],
    shown: Bool[Tensor, "image row column"],
    title: str = "",
) -> Figure:
    """Images over their patch features as colours, the foreground's alone and all.

    Args:
        images: to draw; the first ones of those that have tokens.
        tokens: of all images that the components are fitted over.
        shown: their foreground.
        title: of the figure.
    """
    maps = component_colours(tokens, shown), component_colours(tokens, torch.ones_like(shown))
    rows = []
    for start in range(0, len(images), COLUMNS):
        own = range(start, min(start + COLUMNS, len(images)))
        rows += [
            [Cell(images[i]) for i in own],
            *([Cell(enlarge(one[i], images[i].shape[:2])) for i in own] for one in maps),
        ]
    return picture_grid(rows, title)


def similarity_figure(
    images: Pictures, tokens: Float[Tensor, "image row column dim"], title: str = ""
) -> Figure:
    """Row by row a chosen patch, marked, and how similar the patches of its image and of others are to it."""
    grid = tuple(tokens.shape[1:3])
    rows = []
    for query in range(min(len(images) - 1, COLUMNS)):
        row, column = chosen_patch(images[query], grid)
        similarity = patch_similarity(tokens[: len(images)], query, row, column).numpy()
        low, high = np.quantile(similarity, 0.02), np.partition(similarity.ravel(), -2)[-2]  # but for itself
        others = [query, *(i for i in range(len(images)) if i != query)][: COLUMNS - 1]
        maps = [Cell(over(images[i], heat(similarity[i], low, high, "magma"), 0.75)) for i in others]
        rows.append([Cell(images[query], mark=(row, column, *grid)), *maps])
    return picture_grid(rows, title)


def attention_figure(
    images: Pictures, weights: Float[Tensor, "image head row column"], title: str = ""
) -> Figure:
    """Images beside the class token's attention, by head, each at its own scale."""
    heads = weights.shape[1]
    rows = []
    for number, (image, maps) in enumerate(zip(images, weights.numpy(), strict=False)):
        named = [f"head {head + 1}" if number == 0 else "" for head in range(heads)]
        cells = [
            Cell(enlarge(heat(one, one.min(), one.max()), image.shape[:2]), name)
            for one, name in zip(maps, named, strict=True)
        ]
        rows.append([Cell(image, "image" if number == 0 else ""), *cells])
    return picture_grid(rows, title, FIGURE_INCHES * (1 if heads < 8 else 2))


def neighbour_figure(
    image_of: Callable[[int], UInt8[np.ndarray, "height width 3"]],
    features: Float[Tensor, "image dim"],
    labels: Int64[Tensor, " image"] | None,
    queries: Sequence[int],
    title: str = "",
) -> Figure:
    """Row by row an image and those of most similar features, framed by whether the class is its own."""
    directions = F.normalize(features.float(), dim=1)
    rows = []
    for query in queries:
        similarity = directions @ directions[query]
        similarity[query] = -torch.inf
        found = similarity.topk(min(COLUMNS - 1, len(features) - 1))
        frames = [
            None if labels is None else RIGHT if labels[i] == labels[query] else WRONG for i in found.indices
        ]
        cells = [
            Cell(image_of(int(i)), below=f"{value:.2f}", frame=frame)
            for i, value, frame in zip(found.indices, found.values, frames, strict=True)
        ]
        rows.append([Cell(image_of(query), below="image"), *cells])
    return picture_grid(rows, title)


def prediction_figure(
    images: Pictures,
    prediction: Prediction,
    true_tokens: Int64[Tensor, "image patch"],
    stand_ins: UInt8[np.ndarray, "token row column 3"],
    grid: tuple[int, int],
    title: str = "",
) -> Figure:
    """Row by row an image, what the model sees of it, what it predicts, the true tokens, and the order.

    Args:
        images: to draw.
        prediction: of these images.
        true_tokens: their tokens `(B, N)`.
        stand_ins: the patch that stands for each token.
        grid: patches by rows and columns.
        title: of the figure.
    """
    rows = []
    heads = ("image", "seen", "predicted", "true tokens", "order")
    for number, image in enumerate(images):
        patches, places = cut_patches([image], grid), prediction.places[number].numpy()
        seen, predicted, true = patches.copy(), patches.copy(), patches.copy()
        truth, guess = true_tokens[number].numpy()[places], prediction.tokens[number].numpy()
        seen[places], predicted[places], true[places] = HIDDEN_COLOUR, stand_ins[guess], stand_ins[truth]
        order, colours = np.full(grid[0] * grid[1], -1), np.empty((grid[0] * grid[1], 3), np.uint8)
        order[places] = np.arange(len(places)) + 1 if prediction.one_by_one else 0
        colours[:] = HIDDEN_COLOUR
        colours[places] = np.where((truth == guess)[:, None], (120, 200, 140), (240, 170, 160))
        share = f"{100 * (truth == guess).mean():.0f} % right"
        pictures = [image, *(join_patches(each, grid) for each in (seen, predicted, true))]
        map_ = enlarge(colours.reshape(*grid, 3), image.shape[:2])
        cells = [
            Cell(one, head) for one, head in zip(pictures, heads if number == 0 else [""] * 4, strict=False)
        ]
        numbers = order.reshape(grid) if prediction.one_by_one else None
        rows.append([*cells, Cell(map_, heads[4] if number == 0 else "", share, numbers=numbers)])
    return picture_grid(rows, title)
