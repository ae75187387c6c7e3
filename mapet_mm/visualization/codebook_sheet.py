"""Codebook sheets: patches that share a token, each framed in its image, as in the paper's figures."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from mapet_mm.tokenizers import TokenStore
from mapet_mm.visualization.covered_part import Box, CoveredParts, largest_centred

CELL_INCHES, GAP_INCHES, TITLE_INCHES = 0.72, 0.06, 0.26
FRAME_COLOUR = "#e6252f"
# Crops smaller than this many pixels are drawn without smoothing, which would hide the patch's content.
SMALL_CROP = 96


class Patch(NamedTuple):
    """A patch of an image: the image's name in the token store and the patch's position in the grid."""

    name: str
    row: int
    col: int


class SheetRow(NamedTuple):
    """One row of a sheet: patches and the text above them."""

    title: str
    patches: Sequence[Patch]


def find_members(
    store: TokenStore, tokens: Iterable[int], limit: int | None = None, seed: int = 0
) -> dict[int, list[Patch]]:
    """Patches of each token, in the store's order of images and row by row inside an image.

    Args:
        store: the token store.
        tokens: token ids.
        limit: keep a random sample, in random order, of at most this many patches per token.
        seed: for that sample.

    Raises:
        ValueError: an id is outside the store's vocabulary.
    """
    members: dict[int, list[Patch]] = {int(token): [] for token in tokens}
    for token in members:
        if not 0 <= token < store.vocab_size:
            raise ValueError(
                f"token {token} is outside the vocabulary of token store `{store.path}`: "
                f"its ids are 0 to {store.vocab_size - 1}"
            )
    seen = dict.fromkeys(members, 0)
    draw = random.Random(seed)
    for rows, grids in store.chunks():
        for image, row, col in np.argwhere(np.isin(grids, list(members))).tolist():
            token = int(grids[image, row, col])
            patch = Patch(store.names[int(rows[image])], row, col)
            seen[token] += 1
            kept = members[token]
            if limit is None or len(kept) < limit:
                kept.append(patch)
            # Reservoir sampling: each of the patches seen so far is kept with the same probability.
            elif (place := draw.randrange(seen[token])) < limit:
                kept[place] = patch
    return members


def choose_members(patches: Sequence[Patch], count: int, seed: int) -> list[Patch]:
    """A seeded random choice of at most `count` patches, of as many different images as possible."""
    order = np.random.default_rng(seed).permutation(len(patches))
    first_of_image: dict[str, int] = {}
    for place in order.tolist():
        first_of_image.setdefault(patches[place].name, place)
    chosen = list(first_of_image.values())[:count]
    taken = set(first_of_image.values())
    chosen += [place for place in order.tolist() if place not in taken][: count - len(chosen)]
    return [patches[place] for place in chosen]


def crop_around(
    image: Image.Image, patch: Patch, grid: tuple[int, int], context: int, part: Box | None = None
) -> tuple[UInt8[np.ndarray, "height width 3"], tuple[float, float, float, float]]:
    """Cut a patch out of its image together with its surroundings.

    Args:
        image: the whole image.
        patch: the patch.
        grid: `(H, W)` patches of an image.
        context: patches to show on each side; the window stays inside the grid, so it shifts at the border.
        part: of the image, that the grid covers; the largest centred one with the grid's shape by default.

    Returns:
        The crop and the patch's frame in it: left, top, width, height in pixels of the crop.
    """
    part = largest_centred(image.size, grid) if part is None else part
    height, width = part.height / grid[0], part.width / grid[1]  # pixels of a patch
    rows, cols = (min(2 * context + 1, length) for length in grid)
    first_row = min(max(patch.row - context, 0), grid[0] - rows)
    first_col = min(max(patch.col - context, 0), grid[1] - cols)
    x, y = part.left + first_col * width, part.top + first_row * height
    window = round(x), round(y), round(x + cols * width), round(y + rows * height)
    crop = np.asarray(_of_8_bits(image).crop(window))
    x, y = part.left + patch.col * width - round(x), part.top + patch.row * height - round(y)
    return crop, (x, y, width, height)


def _of_8_bits(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # scaled as MMCV does; Pillow would clip it
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def draw_codebook_sheet(
    rows: Sequence[SheetRow], image_root: str | os.PathLike, store: TokenStore, context: int = 3
) -> Figure:
    """Draw patches that share a token, each framed in its surroundings, one row of cells per `SheetRow`.

    Args:
        rows: what to draw.
        image_root: the folder that the patches' image names are relative to.
        store: has the patches, and says which part of an image its grid covers.
        context: patches shown around the framed one, on each side.

    Raises:
        FileNotFoundError: an image is not under `image_root`.
        TokenStoreError: the store records a pipeline that does not say which part of an image it shows.
    """
    columns = max(1, *(len(row.patches) for row in rows))
    width = columns * (CELL_INCHES + GAP_INCHES)
    height = len(rows) * (CELL_INCHES + TITLE_INCHES) + GAP_INCHES
    figure = Figure(figsize=(width, height))
    # Fixed layout: an automatic one would widen the first column to hold the row's title.
    figure.subplots_adjust(0, GAP_INCHES / height, 1 - GAP_INCHES / width, 1 - TITLE_INCHES / height)
    spaces = {"wspace": GAP_INCHES / CELL_INCHES, "hspace": TITLE_INCHES / CELL_INCHES}
    cells = figure.subplots(len(rows), columns, squeeze=False, gridspec_kw=spaces)
    parts = CoveredParts(store)
    for line, row in zip(cells, rows, strict=True):
        _draw_row(line, row.patches, Path(image_root), store.grid, context, parts)
        line[0].set_title(row.title, fontsize=9, loc="left", pad=3)
    return figure


def count_patches(number: int) -> str:
    """A number of patches as text."""
    return f"{number:,} patch{'es' if number != 1 else ''}"


def _draw_row(
    line: Sequence[Axes],
    patches: Sequence[Patch],
    root: Path,
    grid: tuple[int, int],
    context: int,
    parts: CoveredParts,
) -> None:
    for axes in line:
        axes.set_axis_off()
    for axes, patch in zip(line, patches, strict=False):
        image, part = parts.open(_existing(root / patch.name))
        crop, (x, y, width, height) = crop_around(image, patch, grid, context, part)
        smooth = "antialiased" if crop.shape[1] > SMALL_CROP else "nearest"
        axes.imshow(crop, interpolation=smooth)
        frame = Rectangle((x - 0.5, y - 0.5), width, height, fill=False, color=FRAME_COLOUR, linewidth=1.5)
        axes.add_patch(frame)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(
            f"image `{path}` of the token store does not exist: "
            "give the folder that the store's names are relative to as the image root"
        )
    return path
