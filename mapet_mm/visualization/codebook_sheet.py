"""Codebook sheets: patches that share a token, each framed in its image (as in the paper's figures)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from mapet_mm.tokenizers.token_store import TokenStore

CELL_INCHES = 0.72
FRAME_COLOUR = "#e6252f"
# Below this many pixels a crop is drawn pixel by pixel, because smoothing would hide what the patch shows.
SMALL_CROP = 96


class Patch(NamedTuple):
    """One patch of one image: the image's name in the token store and the patch's place in the token grid."""

    name: str
    row: int
    col: int


def token_counts(store: TokenStore) -> Int[np.ndarray, " vocab"]:
    """How many patches of the store have each token, `(vocab_size,)`; images not yet written do not count."""
    counts = np.zeros(store.vocab_size, dtype=np.int64)
    for _, grid in _written_grids(store):
        counts += np.bincount(grid.ravel(), minlength=store.vocab_size)
    return counts


def most_used_tokens(store: TokenStore, count: int) -> list[int]:
    """The tokens of most patches, most used first, at most `count` and only tokens in use."""
    counts = token_counts(store)
    order = np.argsort(-counts, kind="stable")[:count]
    return [int(token) for token in order if counts[token]]


def random_tokens(store: TokenStore, count: int, seed: int) -> list[int]:
    """Tokens in use, drawn without replacement with a seed, in ascending order."""
    used = np.flatnonzero(token_counts(store))
    drawn = np.random.default_rng(seed).choice(used, size=min(count, len(used)), replace=False)
    return sorted(int(token) for token in drawn)


def find_members(store: TokenStore, tokens: Iterable[int]) -> dict[int, list[Patch]]:
    """All patches of each token, in the store's order of images and row by row inside an image.

    Args:
        store: the token store.
        tokens: token ids.

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
    for name, grid in _written_grids(store):
        for row, col in np.argwhere(np.isin(grid, list(members))).tolist():
            members[int(grid[row, col])].append(Patch(name, row, col))
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
    image: Image.Image, patch: Patch, grid: tuple[int, int], context: int
) -> tuple[UInt8[np.ndarray, "height width 3"], tuple[float, float, float, float]]:
    """Cut a patch out of its image together with its surroundings.

    The token grid covers the largest centred part of the image with the grid's shape, as pre-training does.

    Args:
        image: the whole image.
        patch: the patch.
        grid: `(H, W)` patches of an image.
        context: patches to show on each side; the window stays inside the image, so it shifts at the border.

    Returns:
        The crop and the patch's frame in it: left, top, width, height in pixels of the crop.
    """
    side = min(image.height / grid[0], image.width / grid[1])  # pixels of a patch
    top, left = (image.height - side * grid[0]) / 2, (image.width - side * grid[1]) / 2
    rows, cols = (min(2 * context + 1, length) for length in grid)
    first_row = min(max(patch.row - context, 0), grid[0] - rows)
    first_col = min(max(patch.col - context, 0), grid[1] - cols)
    x, y = left + first_col * side, top + first_row * side
    crop = image.convert("RGB").crop((round(x), round(y), round(x + cols * side), round(y + rows * side)))
    frame = (left + patch.col * side - round(x), top + patch.row * side - round(y), side, side)
    return np.asarray(crop), frame


def draw_codebook_sheet(
    store: TokenStore,
    image_root: str | os.PathLike,
    tokens: Sequence[int] | None = None,
    rows: int = 8,
    columns: int = 6,
    context: int = 3,
    seed: int = 0,
) -> Figure:
    """Draw patches that share a token: one row of cells per token.

    Args:
        store: the token store.
        image_root: the folder that the store's names are relative to.
        tokens: token ids to show; the most used ones by default.
        rows: how many tokens to show when `tokens` is not given.
        columns: patches per token.
        context: patches shown around the framed one, on each side.
        seed: chooses among a token's patches.

    Raises:
        ValueError: a token is outside the vocabulary, or the store holds no token to draw.
        FileNotFoundError: an image is not under `image_root`.
    """
    tokens = most_used_tokens(store, rows) if tokens is None else list(tokens)
    if not tokens:
        raise ValueError(f"token store `{store.path}` holds no tokens yet: run tools/extract_tokens.py first")
    members = find_members(store, tokens)
    size = (columns * CELL_INCHES + 0.1, len(tokens) * (CELL_INCHES + 0.24) + 0.1)
    figure = Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02, wspace=0.02, hspace=0.02)
    cells = figure.subplots(len(tokens), columns, squeeze=False)
    for line, token in zip(cells, members, strict=True):
        chosen = choose_members(members[token], columns, seed)
        _draw_row(line, chosen, Path(image_root), store.grid, context)
        number = len(members[token])
        title = f"token {token}: {number:,} patch{'es' if number != 1 else ''}"
        line[0].set_title(title, fontsize=9, loc="left", pad=3)
    return figure


def _draw_row(
    line: Sequence[Axes], patches: Sequence[Patch], root: Path, grid: tuple[int, int], context: int
) -> None:
    for axes in line:
        axes.set_axis_off()
    for axes, patch in zip(line, patches, strict=False):
        crop, (x, y, width, height) = crop_around(_open_image(root, patch.name), patch, grid, context)
        smooth = "antialiased" if crop.shape[1] > SMALL_CROP else "nearest"
        axes.imshow(crop, interpolation=smooth)
        frame = Rectangle((x - 0.5, y - 0.5), width, height, fill=False, color=FRAME_COLOUR, linewidth=1.5)
        axes.add_patch(frame)


def _open_image(root: Path, name: str) -> Image.Image:
    path = root / name
    if not path.is_file():
        raise FileNotFoundError(
            f"image `{path}` of the token store does not exist: "
            "give the folder that the store's names are relative to as the image root"
        )
    return Image.open(path)


def _written_grids(store: TokenStore) -> Iterator[tuple[str, np.ndarray]]:
    written = store.written()
    for row, name in enumerate(store.names):
        if written[row]:
            yield name, store[name]
