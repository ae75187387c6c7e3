"""A safetensors file whose tensors are read in pieces, at any place, without being mapped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mapet_mm.structures.store_files import damage_error

# safetensors' names of the types that stores have.
DTYPES = {"U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8"}


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

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            self._first_byte, self._tensors = self._read_header()
        except (ValueError, OverflowError) as error:
            raise damage_error(path, "it has no header of a safetensors file") from error
        last_byte = max(entry["data_offsets"][1] for entry in self._tensors.values())
        if os.fstat(self._descriptor).st_size != self._first_byte + last_byte:
            raise damage_error(path, "it has another size than its header says")

    def _read_header(self) -> tuple[int, dict[str, Mapping[str, Any]]]:
        """The file's first byte of content, and where each tensor lies after it."""
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if length > os.fstat(self._descriptor).st_size:
            raise ValueError("the header is longer than the file")
        header = json.loads(os.pread(self._descriptor, length, 8))
        header.pop("__metadata__", None)
        return 8 + length, header

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def place(self, tensor: str) -> tuple[int, tuple[int, ...], np.dtype]:
        """The first byte of a tensor in the file, its shape and its type."""
        entry = self._tensors[tensor]
        first_byte = self._first_byte + entry["data_offsets"][0]
        return first_byte, tuple(entry["shape"]), np.dtype(DTYPES[entry["dtype"]])

    def rows(self, tensor: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows of a tensor, a copy; all of them by default."""
        first_byte, shape, dtype = self.place(tensor)
        start, stop, _ = slice(start, stop).indices(shape[0])
        found = np.empty((max(stop - start, 0), *shape[1:]), dtype)
        self.read_into(found, first_byte + start * prod(shape[1:]) * dtype.itemsize)
        return found

    def read_into(self, array: np.ndarray, first_byte: int) -> None:
        """Fill a contiguous array from this place in the file."""
        if array.nbytes and os.preadv(self._descriptor, [array], first_byte) != array.nbytes:
            raise damage_error(self.path, "it ends too early")
