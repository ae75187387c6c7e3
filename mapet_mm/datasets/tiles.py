"""Tiles of pictures larger than a network's image, each an image of the name `FILE#x,y`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jaxtyping import Shaped

from mapet_mm.datasets.copies import THREADS
from mapet_mm.datasets.pictures import look_at_path, of_any_size, size_of
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
    # Here too, because the threads would set the limit back for each other.
    with of_any_size(), ThreadPoolExecutor(THREADS) as threads:
        sizes = list(threads.map(lambda name: _size(os.path.join(folder, name)), names))
    tiles = []
    for name, (width, height) in zip(names, sizes, strict=True):
        tiles += [f"{name}#{x},{y}" for x, y in corners(width, height, side, overlap)]
    return sorted(tiles), max(width * height for width, height in sizes)


def _size(path: str) -> tuple[int, int]:
    try:
        return size_of(path, look_at_path(path))
    except OSError:
        return 1, 1


def corners(width: int, height: int, side: int, overlap: int = 0) -> list[tuple[int, int]]:
    """The upper left corners `(x, y)` of a picture's tiles, row by row."""
    columns = _starts(width, side, side - overlap)
    return [(x, y) for y in _starts(height, side, side - overlap) for x in columns]


def _starts(length: int, side: int, step: int) -> list[int]:
    last = max(0, length - side)
    return [*range(0, last, step), last]


class LastPicture:
    """The picture that was decoded last in this process: its tiles come one after the other."""

    def __init__(self) -> None:
        self._key: Any = None
        self._pixels: np.ndarray | None = None

    def get(self, key: Any, decode: Callable[[], np.ndarray]) -> Shaped[np.ndarray, "height width band"]:
        """The picture of a key, decoded unless it is the last one."""
        if key != self._key:
            self._key = self._pixels = None  # frees the memory before the next one takes it
            self._pixels = decode()
            self._key = key
        return self._pixels


LAST_PICTURE = LastPicture()


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
