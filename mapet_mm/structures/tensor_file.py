"""Rows of a safetensors file, read into arrays without mapping it."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mapet_mm.utils.errors import UserError

# safetensors' names of the types that parts have.
DTYPES = {"U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "F16": "<f2"}
HOW_TO_RESTORE = (
    "restore it from a copy, or remove it and run `mapet-mm extract-tokens` again (for squares, "
    "`mapet-mm store-images`; for features, the command that takes them)"
)


class TokenStoreError(UserError, ValueError):
    """A token store cannot be made, read or written; the message is one line that says what to do."""


def damage_error(path: str | Path, how: str) -> TokenStoreError:
    """The error of a file of a store that cannot be used."""
    return TokenStoreError(f"token store file `{path}` is damaged ({how}): {HOW_TO_RESTORE}")


class TensorPlace(NamedTuple):
    """Where a tensor lies in a file, and what it is made of."""

    first_byte: int
    num_rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype
    row_bytes: int


@lru_cache(maxsize=64)
def places_of(first_byte: int, header: str) -> tuple[dict[str, TensorPlace], int]:
    """Where a file's tensors lie, and the file's size: shared by files of one layout, as parts are.

    Args:
        first_byte: of what follows the header.
        header: safetensors' entries of the tensors, as JSON.
    """
    places = {}
    ends = []
    for name, entry in json.loads(header).items():
        num_rows, *row_shape = entry["shape"]
        dtype = np.dtype(DTYPES[entry["dtype"]])
        row_bytes = prod(row_shape) * dtype.itemsize
        start, end = entry["data_offsets"]
        places[name] = TensorPlace(first_byte + start, num_rows, tuple(row_shape), dtype, row_bytes)
        ends.append(first_byte + end)
    return places, max(ends)


class TensorFile:
    """An open safetensors file, from which rows of a tensor are read into arrays.

    Nothing is mapped: what is read of a mapping stays in the process's memory and page tables (376 MB of
    these for ImageNet's squares, in each worker), and a file that another program cuts off, or that another
    machine replaces, ends the process by a signal. An open file may be used after a fork, because reading
    moves no position. safetensors 0.8 can read in the same way (`safe_open(backend="pread")`), but not into
    an array that is there.

    Args:
        path: of the file; it stays open until the object is collected.

    Raises:
        TokenStoreError: the file is too short, or no safetensors file.
        FileNotFoundError: there is none.
    """

    __slots__ = ("_descriptor", "_places", "path")

    def __init__(self, path: Path) -> None:
        self.path = os.fspath(path)
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            first_byte, header = self._read_header()
            header.pop("__metadata__", None)
            self._places, num_bytes = places_of(first_byte, json.dumps(header))
        except (ValueError, OverflowError, TypeError, KeyError, AttributeError) as error:
            raise damage_error(path, "it has no header of a safetensors file") from error
        if os.fstat(self._descriptor).st_size != num_bytes:
            raise damage_error(path, "it has another size than its header says")

    def _read_header(self) -> tuple[int, dict[str, Any]]:
        """The file's first byte of content, and its header: where each tensor lies after that byte."""
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if length > os.fstat(self._descriptor).st_size:
            raise ValueError("the header is longer than the file")
        return 8 + length, json.loads(os.pread(self._descriptor, length, 8))

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def about(self) -> dict[str, Any]:
        """What the file says about itself: `skipped` and `sha256` of a part."""
        _, header = self._read_header()
        return json.loads(header["__metadata__"]["about"])

    def rows(self, tensor: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows of a tensor, a copy; all of them by default."""
        place = self._places[tensor]
        stop = place.num_rows if stop is None else min(stop, place.num_rows)
        found = np.empty((max(stop - start, 0), *place.row_shape), place.dtype)
        self._fill(found, place.first_byte + start * place.row_bytes)
        return found

    def read_row(self, tensor: str, row: int, out: np.ndarray, skip: int = 0) -> None:
        """Read a row into a contiguous array of its shape and type, or a piece that begins at a byte."""
        first_byte, _, _, _, row_bytes = self._places[tensor]
        first_byte += row * row_bytes + skip
        if os.preadv(self._descriptor, [out], first_byte) < out.nbytes:
            self._fill(out, first_byte)

    def read_bytes(self, tensor: str, start: int, stop: int) -> bytes:
        """The bytes of a few rows, for what is too small to be worth an array."""
        first_byte, num_rows, _, _, row_bytes = self._places[tensor]
        size = (min(stop, num_rows) - start) * row_bytes
        content = os.pread(self._descriptor, size, first_byte + start * row_bytes)
        if len(content) != size:
            raise damage_error(self.path, "it ends too early")
        return content

    def _fill(self, array: np.ndarray, first_byte: int) -> None:
        filled = os.preadv(self._descriptor, [array], first_byte)
        while filled < array.nbytes:  # one call reads 2 GB at most
            rest = memoryview(array).cast("B")[filled:]
            count = os.preadv(self._descriptor, [rest], first_byte + filled)
            if count == 0:
                raise damage_error(self.path, "it ends too early")
            filled += count
