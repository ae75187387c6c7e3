"""Codebook sheets: patches that share a token, each framed in its image, as in the paper's figures."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import mmcv
import numpy as np
from jaxtyping import UInt8
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from mmengine.registry import DefaultScope

from mapet_mm.registry import TRANSFORMS
from mapet_mm.tokenizers import TokenStore
from mapet_mm.utils.errors import UserError
from mapet_mm.visualization.report import Section
from mapet_mm.visualization.token_statistics import TokenUsage

CELL_INCHES = 0.72
GAP_INCHES = 0.06
TITLE_INCHES = 0.26
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
    wanted = [int(token) for token in tokens]
    for token in wanted:
        if not 0 <= token < store.vocab_size:
            raise UserError(f"token {token}: token store `{store.path}` has 0 to {store.vocab_size - 1}")

    # Where each token occurs: arrays of (store row, grid row, grid column).
    found: dict[int, list[np.ndarray]] = {token: [np.empty((0, 3), np.int64)] for token in wanted}
    for store_rows, grids in store.chunks():
        for token in wanted:
            images, grid_rows, grid_cols = np.nonzero(grids == token)
            found[token].append(np.stack([store_rows[images], grid_rows, grid_cols], axis=1))

    draw = np.random.default_rng(seed)
    members = {}
    for token, parts in found.items():
        positions = np.concatenate(parts)
        if limit is not None and len(positions) > limit:
            positions = draw.choice(positions, limit, replace=False)
        members[token] = [Patch(store.names[image], row, col) for image, row, col in positions.tolist()]
    return members


def choose_members(patches: Sequence[Patch], count: int, seed: int) -> list[Patch]:
    """Choose at most `count` patches at random, from as many different images as possible."""
    order = np.random.default_rng(seed).permutation(len(patches))
    taken: Counter[str] = Counter()
    numbered = []
    for index in order:
        patch = patches[index]
        numbered.append((taken[patch.name], patch))
        taken[patch.name] += 1
    # The first patch of each image, then the second, ...
    numbered.sort(key=lambda pair: pair[0])
    return [patch for _, patch in numbered[:count]]


def crop_around(
    image: UInt8[np.ndarray, "height width 3"], patch: Patch, grid: tuple[int, int], context: int
) -> tuple[UInt8[np.ndarray, "rows cols 3"], tuple[float, float, float, float]]:
    """Cut a patch out of its image together with `context` patches on each side, inside the grid.

    The grid of `(H, W)` patches covers the image's largest centred part of its shape. The second result is
    the patch's frame in the crop: left, top, width, height in pixels.
    """
    height, width = image.shape[:2]
    num_rows, num_cols = grid
    side = min(height / num_rows, width / num_cols)  # pixels of a patch
    # The grid's corner in the image.
    top = (height - side * num_rows) / 2
    left = (width - side * num_cols) / 2

    first_row, last_row = _window(patch.row, context, num_rows)
    first_col, last_col = _window(patch.col, context, num_cols)
    y = round(top + first_row * side)
    x = round(left + first_col * side)
    crop = image[y : round(top + last_row * side), x : round(left + last_col * side)]
    frame = (left + patch.col * side - x, top + patch.row * side - y, side, side)
    return crop, frame


def _window(centre: int, context: int, length: int) -> tuple[int, int]:
    """The first cell, and the one after the last, of a window around a cell that stays inside the grid."""
    size = min(2 * context + 1, length)
    first = min(max(centre - context, 0), length - size)
    return first, first + size


def picture_reader(store: TokenStore) -> Callable[[str], UInt8[np.ndarray, "height width 3"]]:
    """What reads an image in RGB as the tokenizer of a store did: also a tile, or one of more than 8 bits."""
    pipeline = (store.preprocessing or {}).get("pipeline") or [dict(type="LoadImageFromFile")]
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        load = TRANSFORMS.build(pipeline[0])
    return lambda path: load(dict(img_path=path))["img"][:, :, ::-1]


def draw_codebook_sheet(
    rows: Sequence[SheetRow],
    image_root: str | os.PathLike,
    grid: tuple[int, int],
    context: int = 3,
    read: Callable[[str], UInt8[np.ndarray, "height width 3"]] | None = None,
) -> Figure:
    """Draw patches that share a token, each framed in its surroundings, one row of cells per `SheetRow`.

    Args:
        rows: the patches.
        image_root: the folder that the patches' image names are relative to.
        grid: `(H, W)` patches of an image.
        context: patches shown around the framed one, on each side.
        read: an image in RGB by its path; None reads photographs, upright and in 8 bits.
    """
    read = read or partial(mmcv.imread, channel_order="rgb")
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
            image = read(os.path.join(image_root, patch.name))
            crop, (x, y, *size) = crop_around(image, patch, grid, context)
            # Smoothing would hide the patch's content in a small crop
            axes.imshow(crop, interpolation="antialiased" if crop.shape[1] > 96 else "nearest")
            frame = Rectangle((x - 0.5, y - 0.5), *size, fill=False, color=FRAME_COLOUR, linewidth=1.5)
            axes.add_patch(frame)
    return figure


def codebook_section(
    store: TokenStore,
    usage: TokenUsage,
    image_root: str | os.PathLike,
    tokens: int = 8,
    patches: int = 6,
) -> Section:
    """Random patches of the most used tokens, one token a row.

    Args:
        store: the token store.
        usage: of its tokens, by `measure_usage`.
        image_root: the folder that the store's image names are relative to.
        tokens: number of tokens.
        patches: number of patches of each.
    """
    members = find_members(store, usage.most_used(tokens))
    rows = []
    for token, found in members.items():
        chosen = choose_members(found, patches, seed=0)
        rows.append(SheetRow(f"token {token}: {len(found):,} patches", chosen))
    caption = (
        f"One token a row, its patch framed in red in its surroundings: the {len(rows)} most used of "
        f"{store.vocab_size} tokens; patches drawn at random."
    )
    figure = draw_codebook_sheet(rows, image_root, store.grid, read=picture_reader(store))
    return Section("Patches that share a token", caption, [figure])
