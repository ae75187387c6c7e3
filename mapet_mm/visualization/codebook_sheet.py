"""Codebook sheets: patches that share a token, each framed in its image, as in the paper's figures."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import mmcv
import numpy as np
from jaxtyping import UInt8
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mapet_mm.tokenizers import TokenStore
from mapet_mm.utils.errors import UserError
from mapet_mm.visualization.report import Section
from mapet_mm.visualization.token_statistics import measure_usage

CELL_INCHES, GAP_INCHES, TITLE_INCHES = 0.72, 0.06, 0.26
FRAME_COLOUR = "#e6252f"


class Patch(NamedTuple):
    """A patch: its image's name in the token store, and its position in the grid."""

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
    """Find the patches of each token, in the store's order of images and row by row inside an image.

    Args:
        store: the token store.
        tokens: token ids.
        limit: keep a random sample, in random order, of at most this many patches per token.
        seed: for that sample.
    """
    found: dict[int, list[np.ndarray]] = {int(token): [np.empty((0, 3), np.int64)] for token in tokens}
    if outside := [token for token in found if not 0 <= token < store.vocab_size]:
        raise UserError(f"token {outside[0]}: token store `{store.path}` has 0 to {store.vocab_size - 1}")
    for rows, grids in store.chunks():
        for token, places in found.items():
            images, *cells = np.nonzero(grids == token)
            places.append(np.stack([rows[images], *cells], axis=1))
    draw = np.random.default_rng(seed)
    members = {}
    for token, parts in found.items():
        places = np.concatenate(parts)
        if limit is not None and len(places) > limit:
            places = draw.choice(places, limit, replace=False)
        members[token] = [Patch(store.names[image], row, col) for image, row, col in places.tolist()]
    return members


def choose_members(patches: Sequence[Patch], count: int, seed: int) -> list[Patch]:
    """Choose at most `count` patches at random, from as many different images as possible."""
    shuffled = [patches[place] for place in np.random.default_rng(seed).permutation(len(patches))]
    of_image: dict[str, list[Patch]] = defaultdict(list)
    for patch in shuffled:
        of_image[patch.name].append(patch)
    # the first patch of each image, then the second, ...
    return sorted(shuffled, key=lambda patch: of_image[patch.name].index(patch))[:count]


def crop_around(
    image: UInt8[np.ndarray, "height width 3"], patch: Patch, grid: tuple[int, int], context: int
) -> tuple[UInt8[np.ndarray, "rows cols 3"], tuple[float, float, float, float]]:
    """Cut a patch out of its image together with `context` patches on each side, inside the grid.

    The grid of `(H, W)` patches covers the image's largest centred part of its shape. The second result is
    the patch's frame in the crop: left, top, width, height in pixels.
    """
    height, width = image.shape[:2]
    side = min(height / grid[0], width / grid[1])  # pixels of a patch
    top, left = (height - side * grid[0]) / 2, (width - side * grid[1]) / 2
    rows, cols = (min(2 * context + 1, length) for length in grid)
    first_row = min(max(patch.row - context, 0), grid[0] - rows)
    first_col = min(max(patch.col - context, 0), grid[1] - cols)
    y, x = round(top + first_row * side), round(left + first_col * side)
    crop = image[y : round(top + (first_row + rows) * side), x : round(left + (first_col + cols) * side)]
    return crop, (left + patch.col * side - x, top + patch.row * side - y, side, side)


def draw_codebook_sheet(
    rows: Sequence[SheetRow], image_root: str | os.PathLike, grid: tuple[int, int], context: int = 3
) -> Figure:
    """Draw patches that share a token, each framed in its surroundings, one row of cells per `SheetRow`.

    Args:
        rows: the patches.
        image_root: the folder that the patches' image names are relative to.
        grid: `(H, W)` patches of an image.
        context: patches shown around the framed one, on each side.
    """
    columns = max(1, *(len(row.patches) for row in rows))
    width = columns * (CELL_INCHES + GAP_INCHES)
    height = len(rows) * (CELL_INCHES + TITLE_INCHES) + GAP_INCHES
    figure = Figure(figsize=(width, height))
    # Fixed layout: an automatic one would widen the first column to hold the row's title.
    figure.subplots_adjust(0, GAP_INCHES / height, 1 - GAP_INCHES / width, 1 - TITLE_INCHES / height)
    spaces = {"wspace": GAP_INCHES / CELL_INCHES, "hspace": TITLE_INCHES / CELL_INCHES}
    cells = figure.subplots(len(rows), columns, squeeze=False, gridspec_kw=spaces)
    for line, row in zip(cells, rows, strict=True):
        line[0].set_title(row.title, fontsize=9, loc="left", pad=3)
        for axes in line:
            axes.set_axis_off()
        for axes, patch in zip(line, row.patches, strict=False):
            image = mmcv.imread(Path(image_root, patch.name), channel_order="rgb")  # upright, 8 bits
            crop, (x, y, *size) = crop_around(image, patch, grid, context)
            # smoothing would hide the patch's content in a small crop
            axes.imshow(crop, interpolation="antialiased" if crop.shape[1] > 96 else "nearest")
            frame = Rectangle((x - 0.5, y - 0.5), *size, fill=False, color=FRAME_COLOUR, linewidth=1.5)
            axes.add_patch(frame)
    return figure


def codebook_section(
    store: TokenStore, image_root: str | os.PathLike, tokens: int = 8, patches: int = 6
) -> Section:
    """Random patches of the most used tokens, one token a row.

    Args:
        store: the token store.
        image_root: the folder that the store's image names are relative to.
        tokens: number of tokens.
        patches: number of patches of each.
    """
    members = find_members(store, measure_usage(store).most_used(tokens))
    rows = []
    for token, found in members.items():
        chosen = choose_members(found, patches, seed=0)
        rows.append(SheetRow(f"token {token}: {len(found):,} patches", chosen))
    caption = (
        f"One token a row, its patch framed in red in its surroundings: the {len(rows)} most used of "
        f"{store.vocab_size} tokens; patches drawn at random."
    )
    return Section("Patches that share a token", caption, [draw_codebook_sheet(rows, image_root, store.grid)])
