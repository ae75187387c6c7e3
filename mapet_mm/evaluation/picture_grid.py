"""Rows of small pictures with what is written above, below and in them, for the page's figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from jaxtyping import Float, Int, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

# Characters of a title.
TITLE = 54
# Two figures stand side by side on the page.
FIGURE_INCHES, GAP_INCHES, LINE_INCHES = 4.7, 0.05, 0.19
TEXT_SIZE = 8
RIGHT, WRONG, MARK = "#2f9e57", "#d8432f", "#ff3b30"
# From this many pixels a side pictures are drawn smoothly; smaller ones pixel by pixel.
SMOOTH = 96


@dataclass(frozen=True)
class Cell:
    """A picture.

    Args:
        picture: `(h, w, 3)` uint8.
        above: written above it.
        below: written below it.
        frame: colour of a frame around it.
        mark: a patch to mark: row and column, and the grid's rows and columns.
        numbers: a number in each patch `(H, W)`, below 0 for none.
    """

    picture: UInt8[np.ndarray, "height width 3"]
    above: str = ""
    below: str = ""
    frame: str | None = None
    mark: tuple[int, int, int, int] | None = None
    numbers: Int[np.ndarray, "row column"] | None = None


def picture_grid(
    rows: Sequence[Sequence[Cell | None]], title: str = "", width: float = FIGURE_INCHES
) -> Figure:
    """Pictures in rows, all of one size; None leaves a gap.

    Args:
        rows: the pictures, left to right and top to bottom.
        title: written above all.
        width: of the figure, in inches.
    """
    columns = max(map(len, rows))
    cell = (width - (columns - 1) * GAP_INCHES) / columns
    first = next(one for row in rows for one in row if one is not None)
    tall = cell * first.picture.shape[0] / first.picture.shape[1]
    written = [
        [any(one and getattr(one, place) for one in row) for place in ("above", "below")] for row in rows
    ]
    heights = [tall + LINE_INCHES * sum(lines) + GAP_INCHES for lines in written]
    height = sum(heights) + (1.4 * LINE_INCHES if title else 0)
    figure = Figure(figsize=(width, height))
    top = height
    if title:
        top -= 1.4 * LINE_INCHES
        short = title if len(title) <= TITLE else f"{title[: TITLE // 2]} ... {title[-TITLE // 2 :]}"
        figure.text(0, 1, short, fontsize=TEXT_SIZE + 1, fontweight="bold", va="top")
    for row, (above, _), tallness in zip(rows, written, heights, strict=True):
        bottom = (top - LINE_INCHES * above - tall) / height
        for place, one in enumerate(row):
            if one is not None:
                left = place * (cell + GAP_INCHES) / width
                _draw(figure.add_axes((left, bottom, cell / width, tall / height)), one, cell)
        top -= tallness
    return figure


def _draw(axes: Axes, cell: Cell, inches: float) -> None:
    height, width = cell.picture.shape[:2]
    axes.imshow(cell.picture, interpolation="antialiased" if width > SMOOTH else "nearest", aspect="auto")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(cell.frame is not None)
    axes.spines[:].set(color=cell.frame or "none", linewidth=2)
    axes.set_title(cell.above, fontsize=TEXT_SIZE, pad=2.5)
    axes.set_xlabel(cell.below, fontsize=TEXT_SIZE - 1, labelpad=2)
    if cell.mark is not None:
        row, column, rows, columns = cell.mark
        tall, wide = height / rows, width / columns
        corner = (column * wide - 0.5, row * tall - 0.5)
        axes.add_patch(Rectangle(corner, wide, tall, fill=False, color=MARK, linewidth=1.5))
    if cell.numbers is not None:
        rows, columns = cell.numbers.shape
        size = min(TEXT_SIZE, 72 * inches / columns * 0.55)
        for (row, column), number in np.ndenumerate(cell.numbers):
            if number >= 0:
                place = (column + 0.5) * width / columns - 0.5, (row + 0.5) * height / rows - 0.5
                dark = cell.picture[int(place[1]), int(place[0])].mean() < 128
                axes.text(
                    *place, str(number), fontsize=size, ha="center", va="center", color="w" if dark else "k"
                )


def heat(
    values: Float[np.ndarray, "row column"], low: float, high: float, colours: str = "viridis"
) -> UInt8[np.ndarray, "row column 3"]:
    """Values as colours of a colour map, between the values of its ends."""
    shares = np.clip((values - low) / max(high - low, 1e-12), 0, 1)
    return (255 * matplotlib.colormaps[colours](shares)[..., :3]).round().astype(np.uint8)


def enlarge(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """A picture of patches at the pixels of the image `(h, w)`, each patch a block."""
    rows, columns = ((np.arange(n) * have // n) for n, have in zip(size, picture.shape[:2], strict=True))
    return picture[rows[:, None], columns]


def over(
    image: UInt8[np.ndarray, "height width 3"],
    colours: UInt8[np.ndarray, "row column 3"],
    opacity: float = 0.6,
) -> UInt8[np.ndarray, "height width 3"]:
    """Patch colours over an image in grey."""
    grey = image.mean(-1, keepdims=True)
    return (opacity * enlarge(colours, image.shape[:2]) + (1 - opacity) * grey).round().astype(np.uint8)
