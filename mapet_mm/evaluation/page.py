"""The page's pictures of features: principal components as colours, and nearest neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from mapet_mm.evaluation.protocol import PROTOCOLS, Evaluated, Protocol, Row
from mapet_mm.visualization.report import Section

# Images that components are fitted over.
FITTED = 256
COLUMNS = 6
# Shares of the values at both ends of a component that take the same colour.
CLIPPED = 0.02
# Characters of a title.
TITLE = 54
# Two figures stand side by side on the page.
FIGURE_INCHES, GAP_INCHES, LINE_INCHES = 4.7, 0.05, 0.19
TEXT_SIZE = 8
RIGHT, WRONG = "#2f9e57", "#d8432f"
# Pictures with this many pixels a side are drawn smoothly, smaller ones pixel by pixel.
SMOOTH = 96
# Heading and caption of each kind of picture.
COLOURS = (
    "Patch features as colours",
    "Images, and the first three principal components of their patches as red, green and blue. The "
    "components are fitted over the images of the set, so one colour means the same in all of them.",
)
NEIGHBOURS = (
    "Nearest neighbours",
    "Left an image, then the images of the set with the most similar features, with their cosine "
    "similarity; green where the class is the same, red where not.",
)

Picture = UInt8[np.ndarray, "height width 3"]


@PROTOCOLS.register_module()
@dataclass(eq=False)
class FeaturePictures(Protocol):
    """Pictures of patch features and of nearest neighbours, without figures in the table.

    Pictures of patches show the `dense_val` images too, where another protocol needs their features.

    Args:
        images: number of images in each kind of picture.
    """

    images: int = 12

    needs: ClassVar = {"val": ["pooled", "tokens"]}

    def __post_init__(self) -> None:
        if self.images < 2:
            raise ValueError(f"images={self.images}: at least 2")

    def run(self, evaluated: Evaluated) -> list[Row]:
        """No figures."""
        return []

    def sections(self, evaluated: Evaluated, rows: Sequence[Row]) -> list[Section]:
        """Colours and neighbours."""
        colours = []
        for name in ("dense_val", "val"):
            bank = evaluated.features.get(name)
            if bank is None or math.prod(bank.grid) < 2 or len(bank) < 2:
                continue
            places = spread(len(bank), self.images)
            fitted = [*places, *(index for index in spread(len(bank), FITTED) if index not in places)]
            pictures = [evaluated.picture(name, index) for index in places]
            title = f"{name}: {evaluated.checkpoint.name}"
            colours.append(component_figure(pictures, bank.tokens(fitted), title))
        sections = [Section(*COLOURS, colours)] if colours else []
        bank = evaluated.features["val"]
        if len(bank) > 2:
            pooled = bank.pooled("mean" if "mean" in bank.poolings else bank.poolings[0])
            queries = spread(len(bank), max(2, self.images // 2))
            image_of, title = partial(evaluated.picture, "val"), evaluated.checkpoint.name
            figure = neighbour_figure(image_of, pooled, bank.labels, queries, title)
            sections.append(Section(*NEIGHBOURS, [figure]))
        return sections


def component_figure(
    images: Sequence[Picture], tokens: Float[Tensor, "image row column dim"], title: str = ""
) -> Figure:
    """Images above their patch features as colours; the components are fitted over all tokens."""
    colours = component_colours(tokens)
    rows = []
    for start in range(0, len(images), COLUMNS):
        own = range(start, min(start + COLUMNS, len(images)))
        rows.append([Cell(images[index]) for index in own])
        rows.append([Cell(enlarge(colours[index], images[index].shape[:2])) for index in own])
    return picture_grid(rows, title)


def component_colours(
    tokens: Float[Tensor, "image row column dim"],
) -> UInt8[np.ndarray, "image row column 3"]:
    """The first three principal components of all patches as red, green and blue."""
    rows = tokens.flatten(0, 2).float()
    centred = rows - rows.mean(0)
    _, _, axes = torch.linalg.svd(centred.T @ centred)
    scores = centred @ axes[:3].T
    # The sign of a component is free: its longer tail is made positive, so that pictures come out the same.
    scores = F.pad(scores * scores.pow(3).sum(0).sign(), (0, 3 - scores.shape[1]))
    low, high = torch.from_numpy(np.quantile(scores.numpy(), [CLIPPED, 1 - CLIPPED], axis=0)).float()
    shares = ((scores - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    return (255 * shares).round().byte().view(*tokens.shape[:3], 3).numpy()


def neighbour_figure(
    image_of: Callable[[int], Picture],
    features: Float[Tensor, "image dim"],
    labels: Int64[Tensor, " image"] | None,
    queries: Sequence[int],
    title: str = "",
) -> Figure:
    """Row by row an image and its nearest neighbours, framed by whether the class is the image's own."""
    directions = F.normalize(features.float(), dim=1)
    rows = []
    for query in queries:
        similarity = directions @ directions[query]
        similarity[query] = -torch.inf
        cells = [Cell(image_of(query), below="image")]
        for value, index in zip(*similarity.topk(min(COLUMNS - 1, len(features) - 1)), strict=True):
            frame = None if labels is None else RIGHT if labels[index] == labels[query] else WRONG
            cells.append(Cell(image_of(int(index)), below=f"{value:.2f}", frame=frame))
        rows.append(cells)
    return picture_grid(rows, title)


@dataclass(frozen=True)
class Cell:
    """A picture in a grid of pictures."""

    picture: Picture
    below: str = ""  # text
    frame: str | None = None  # its colour


def picture_grid(rows: Sequence[Sequence[Cell]], title: str = "") -> Figure:
    """Draw pictures in rows, left to right and top to bottom, all of one size, below a title."""
    columns, (height, width) = max(map(len, rows)), rows[0][0].picture.shape[:2]
    with_text = sum(any(cell.below for cell in row) for row in rows)
    inches = len(rows) * FIGURE_INCHES / columns * height / width + (2 + with_text) * LINE_INCHES
    figure = Figure(figsize=(FIGURE_INCHES, inches), layout="constrained")
    figure.get_layout_engine().set(w_pad=GAP_INCHES / 2, h_pad=GAP_INCHES / 2, wspace=0, hspace=0)
    short = title if len(title) <= TITLE else f"{title[: TITLE // 2]} ... {title[-TITLE // 2 :]}"
    figure.suptitle(short, fontsize=TEXT_SIZE + 1, fontweight="bold", x=0, ha="left")
    places = figure.subplots(len(rows), columns, squeeze=False)
    for cells, row in zip(rows, places, strict=True):
        for cell, axes in zip_longest(cells, row):
            if cell is None:
                axes.remove()
            else:
                _draw(axes, cell)
    return figure


def _draw(axes: Axes, cell: Cell) -> None:
    smooth = cell.picture.shape[1] > SMOOTH
    axes.imshow(cell.picture, interpolation="antialiased" if smooth else "nearest")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(cell.frame is not None)
    axes.spines[:].set(color=cell.frame or "none", linewidth=2)
    axes.set_xlabel(cell.below, fontsize=TEXT_SIZE - 1, labelpad=2)


def enlarge(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """A picture of patches at the pixels of the image `(h, w)`, each patch a block."""
    rows, columns = (np.arange(n) * have // n for n, have in zip(size, picture.shape[:2], strict=True))
    return picture[rows[:, None], columns]


def spread(total: int, count: int) -> list[int]:
    """Up to `count` of `total` places, evenly spaced."""
    return np.linspace(0, total - 1, min(count, total)).round().astype(int).tolist()
