"""Tiles of pictures larger than a network's image, each an image of the name `FILE#x,y`."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from jaxtyping import Shaped

from mapet_mm.datasets.pictures import look_at_path, of_any_size, size_of
from mapet_mm.datasets.reading import in_threads, is_of_storage, read_patiently, storage_message
from mapet_mm.structures.image_files import file_of
from mapet_mm.utils.errors import UserError


def tile_names(
    folder: str | os.PathLike, names: Sequence[str], side: int, overlap: int = 0
) -> tuple[list[str], int]:
    """The tiles of some pictures in order, and the number of pixels of the largest picture.

    A tile is `side` pixels of the picture wide and high, from its corner `x,y`; the last one of a row or
    column is moved inward. A picture that is smaller is one tile, and so is one whose header cannot be read:
    whoever decodes it says why not.

    Args:
        folder: of the pictures.
        names: of the pictures, relative to it.
        side: of a tile.
        overlap: of neighbouring tiles, in pixels.

    Examples:
        >>> [f"{x},{y}" for x, y in corners(500, 200, side=200)]
        ['0,0', '200,0', '300,0']
    """
    paths = [os.path.join(folder, name) for name in names]
    with of_any_size():  # here too, because the threads would set the limit back for each other
        sizes = list(in_threads(_size, paths, "reading sizes"))
    tiles = []
    for name, (width, height) in zip(names, sizes, strict=True):
        tiles += [f"{name}#{x},{y}" for x, y in corners(width, height, side, overlap)]
    return sorted(tiles), max(width * height for width, height in sizes)


def _size(path: str) -> tuple[int, int]:
    try:
        return read_patiently(lambda: size_of(path, look_at_path(path)))
    except OSError as error:
        if is_of_storage(error):
            raise UserError(storage_message(path, error)) from error
        return 1, 1


def corners(width: int, height: int, side: int, overlap: int = 0) -> list[tuple[int, int]]:
    """The upper left corners `(x, y)` of a picture's tiles, row by row."""
    columns = _starts(width, side, side - overlap)
    return [(x, y) for y in _starts(height, side, side - overlap) for x in columns]


def _starts(length: int, side: int, step: int) -> list[int]:
    last = max(0, length - side)
    return [*range(0, last, step), last]


def cut_tile(
    picture: Shaped[np.ndarray, "height width band"], path: str, side: int
) -> Shaped[np.ndarray, "rows columns band"]:
    """The tile of a path `FILE#x,y`.

    Raises:
        UserError: the picture is smaller than when it was divided.
    """
    x, y = map(int, path[len(file_of(path)) + 1 :].split(","))
    height, width = picture.shape[:2]
    if x + min(side, width) > width or y + min(side, height) > height:
        raise UserError(f"`{path}` is outside of the picture, which has {width} x {height} pixels now")
    return picture[y : y + side, x : x + side].copy()
