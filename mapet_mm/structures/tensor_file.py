"""A safetensors file whose tensors are read in pieces, at any place, without being mapped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mapet_mm.structures.store_files import damage_error

# safetensors' names of the types that stores have.
DTYPES = {"U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8"}


class TensorPlace(NamedTuple):
    """Where a tensor lies in a file, and what it is made of."""

    first_byte: int
    num_rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype
    row_bytes: int


class TensorFile:
    """An open safetensors file, from which rows of a tensor are read into arrays.

    Nothing is mapped: what is read of a mapping stays in the process's memory and page tables (376 MB of
    these for ImageNet's squares, in each worker), and a file that another program cuts off ends the process
    by a signal. An open file may be used after a fork, because reading moves no position. safetensors 0.8 can
    read in the same way (`safe_open(backend="pread")`), but not into an array that is there.

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
            first_byte, tensors = self._read_header()
        except (ValueError, OverflowError) as error:
            raise damage_error(path, "it has no header of a safetensors file") from error
        last_byte = max(entry["data_offsets"][1] for entry in tensors.values())
        if os.fstat(self._descriptor).st_size != first_byte + last_byte:
            raise damage_error(path, "it has another size than its header says")
        self._places = {name: self._place(entry, first_byte) for name, entry in tensors.items()}

    def _read_header(self) -> tuple[int, dict[str, Mapping[str, Any]]]:
        """The file's first byte of content, and where each tensor lies after it."""
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if length > os.fstat(self._descriptor).st_size:
            raise ValueError("the header is longer than the file")
        header = json.loads(os.pread(self._descriptor, length, 8))
        header.pop("__metadata__", None)
        return 8 + length, header

    @staticmethod
    def _place(entry: Mapping[str, Any], first_byte: int) -> TensorPlace:
        num_rows, *row_shape = entry["shape"]
        dtype = np.dtype(DTYPES[entry["dtype"]])
        row_bytes = prod(row_shape) * dtype.itemsize
        first_byte += entry["data_offsets"][0]
        return TensorPlace(first_byte, num_rows, tuple(row_shape), dtype, row_bytes)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def rows(self, tensor: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows of a tensor, a copy; all of them by default."""
        place = self._places[tensor]
        stop = place.num_rows if stop is None else min(stop, place.num_rows)
        found = np.empty((max(stop - start, 0), *place.row_shape), place.dtype)
        self._fill(found, place.first_byte + start * place.row_bytes)
        return found

    def read_row(self, tensor: str, row: int, out: np.ndarray) -> None:
        """Read a row into a contiguous array of its shape and type."""
        place = self._places[tensor]
        self._fill(out, place.first_byte + row * place.row_bytes)

    def _fill(self, array: np.ndarray, first_byte: int) -> None:
        filled = os.preadv(self._descriptor, [array], first_byte)
        while filled < array.nbytes:  # one call reads 2 GB at most
            rest = memoryview(array).cast("B")[filled:]
            count = os.preadv(self._descriptor, [rest], first_byte + filled)
            if count == 0:
                raise damage_error(self.path, "it ends too early")
            filled += count
