"""Pictures of frozen features: patch features as colours, and nearest neighbours of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

CELL_INCHES = 0.85
LABEL_INCHES = 1.2
NAME_LENGTH = 18  # characters
SAME_CLASS, OTHER_CLASS = "#2f8f4e", "#d9722a"
Picture = UInt8[np.ndarray, "height width 3"]


def principal_colours(
    tokens: Float[Tensor, "image row column dim"],
) -> Float[np.ndarray, "image row column 3"]:
    """The first three principal components of some images' patch features, together, as red, green and blue.

    The lowest and highest hundredth of each component are cut off.
    """
    flat = tokens.flatten(0, 2).double()
    centred = flat - flat.mean(0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)  # in rising order
    directions = vectors[:, -3:].flip(1)
    # Of a direction and its opposite, the one whose largest entry is positive: the same on each machine.
    largest = directions.abs().argmax(0)
    directions = directions * directions.gather(0, largest[None]).sign()
    components = centred @ directions
    low, high = (components.quantile(part, dim=0) for part in (0.01, 0.99))
    colours = ((components - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    if colours.shape[1] < 3:  # features of fewer dimensions
        colours = F.pad(colours, (0, 3 - colours.shape[1]))
    return colours.unflatten(0, tokens.shape[:3]).numpy()


def principal_figure(
    pictures: Sequence[Picture], colours: Mapping[str, Float[np.ndarray, "image row column 3"]]
) -> Figure:
    """A column for each picture: itself, then its patch features as each model has them.

    Args:
        pictures: the images.
        colours: of `principal_colours`, by the model's name.
    """
    figure, cells = _grid(1 + len(colours), len(pictures))
    _name(cells[0, 0], "image")
    for axes, picture in zip(cells[0], pictures, strict=True):
        axes.imshow(picture)
    for line, (name, images) in zip(cells[1:], colours.items(), strict=True):
        _name(line[0], name)
        for axes, image in zip(line, images, strict=True):
            axes.imshow(image, interpolation="nearest")
    return figure


def nearest_images(
    queries: Float[Tensor, "query dim"], known: Float[Tensor, "image dim"], count: int, itself: bool = False
) -> tuple[Int64[Tensor, "query count"], Float[Tensor, "query count"]]:
    """The images with the highest cosine, and these.

    Args:
        queries, known: features.
        count: number of neighbours.
        itself: True if the queries are among the known images: then the first neighbour is left out.
    """
    cosines = F.normalize(queries, dim=1) @ F.normalize(known, dim=1).T
    first = int(itself)
    values, images = cosines.topk(min(count + first, len(known)), dim=1)
    return images[:, first:], values[:, first:]


def neighbours_figure(
    queries: Sequence[Picture],
    neighbours: Sequence[Sequence[Picture]],
    cosines: Float[Tensor, "query count"],
    same_class: Sequence[Sequence[bool]] | None,
) -> Figure:
    """A line for each query: itself, and its neighbours with their cosines, framed by their class.

    Args:
        queries: the images.
        neighbours: pictures of each query's neighbours.
        cosines: of these.
        same_class: whether each has the query's class; None without classes.
    """
    figure, cells = _grid(len(queries), 1 + len(neighbours[0]), names=False)
    for line, query, pictures, values in zip(cells, queries, neighbours, cosines.tolist(), strict=True):
        line[0].imshow(query)
        for axes, picture, value in zip(line[1:], pictures, values, strict=True):
            axes.imshow(picture)
            axes.text(
                0.04,
                0.05,
                f"{value:.2f}",
                transform=axes.transAxes,
                fontsize=7,
                color="white",
                bbox=dict(facecolor="black", alpha=0.55, pad=1.2, linewidth=0),
            )
    for line, own in zip(cells, same_class or (), strict=False):
        for axes, is_same in zip(line[1:], own, strict=True):
            axes.set_frame_on(True)
            axes.spines[:].set(color=SAME_CLASS if is_same else OTHER_CLASS, linewidth=2.5)
    return figure


def _grid(num_lines: int, num_columns: int, names: bool = True) -> tuple[Figure, np.ndarray]:
    """Square cells without ticks, with room for names at the left."""
    left = LABEL_INCHES if names else 0.05
    width = left + num_columns * CELL_INCHES
    height = num_lines * CELL_INCHES
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(left / width, 0.01, 0.995, 0.99, wspace=0.06, hspace=0.06)
    cells = figure.subplots(num_lines, num_columns, squeeze=False)
    for axes in cells.flat:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_frame_on(False)
    return figure, cells


def _name(axes: Axes, name: str) -> None:
    """Write a line's name at its left; names are no formulas."""
    shown = name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…"
    axes.set_ylabel(shown, rotation=0, ha="right", va="center", fontsize=8, parse_math=False)
