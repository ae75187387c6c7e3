"""Safetensors files read by position: a read's pages are the system's, those of a map count as the reader's.

The format is public: the header's length in 8 bytes, a JSON header with the place of every tensor, the data.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "I64": np.int64, "F16": np.float16}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


class TensorFile:
    """An open safetensors file; processes forked from this one can go on using it.

    Args:
        path: the file.
        error: what to raise where the file is damaged; its message is one line.
        remedy: the end of that message: what to do.

    Raises:
        FileNotFoundError: there is no such file.
    """

    def __init__(self, path: Path, error: type[Exception], remedy: str) -> None:
        self.path, self._error, self._remedy = path, error, remedy
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115, kept open
        size = os.fstat(self._file.fileno()).st_size
        try:
            length = int.from_bytes(self._bytes(0, 8), "little")
            if 8 + length > size:
                raise ValueError(f"{length} bytes long")
            header = json.loads(self._bytes(8, length))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self._tensors = {name: _place(entry, 8 + length) for name, entry in header.items()}
            end = 8 + length + max(entry["data_offsets"][1] for entry in header.values())
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise self._damaged(f"its header: {error}") from None
        if size != end:
            raise self._damaged(f"expected {end} bytes, found {size}")

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The tensor's entries `start` to `stop` along its first axis, a copy."""
        dtype, shape, offset = self._tensor(name)
        stop = shape[0] if stop is None else stop
        values = np.empty((stop - start, *shape[1:]), dtype)
        size = values.nbytes // max(1, len(values))
        self._fill(memoryview(values).cast("B") if values.size else memoryview(b""), offset + start * size)
        return values

    def row_reader(self, name: str) -> Callable[[int], np.ndarray]:
        """A function that reads one entry along the tensor's first axis, a copy."""
        dtype, shape, offset = self._tensor(name)
        inner, number, size = shape[1:], self._file.fileno(), int(np.prod(shape[1:])) * dtype.itemsize

        def read(index: int) -> np.ndarray:
            value = np.empty(inner, dtype)
            # The length counts: of a file truncated meanwhile, the rest would be whatever was in memory.
            if os.preadv(number, [value], offset + index * size) != size:
                raise self._damaged("truncated since it was opened")
            return value

        return read

    def text_reader(self, name: str) -> Callable[[int, int], bytes]:
        """A function that reads the bytes from one place of a tensor of bytes to another."""
        offset, number = self._tensor(name)[2], self._file.fileno()

        def read(start: int, stop: int) -> bytes:
            text = os.pread(number, stop - start, offset + start)
            if len(text) != stop - start:
                raise self._damaged("truncated since it was opened")
            return text

        return read

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The tensor's shape, None if the file has no such tensor."""
        return self._tensors[name][1] if name in self._tensors else None

    def _tensor(self, name: str) -> tuple[np.dtype, tuple[int, ...], int]:
        if name not in self._tensors:
            raise self._damaged(f"it has no tensor `{name}`")
        return self._tensors[name]

    def close(self) -> None:
        """Close the file; it cannot be read any more."""
        self._file.close()

    def _bytes(self, offset: int, count: int) -> bytes:
        found = os.pread(self._file.fileno(), count, offset)
        if len(found) == count:
            return found
        buffer = bytearray(count)
        self._fill(memoryview(buffer), offset)
        return bytes(buffer)

    def _fill(self, buffer: memoryview, offset: int) -> None:
        # One read gives at most 2 GiB.
        while buffer:
            read = os.preadv(self._file.fileno(), [buffer], offset)
            if read == 0:
                raise self._damaged("truncated")
            buffer, offset = buffer[read:], offset + read

    def _damaged(self, how: str) -> Exception:
        return self._error(f"`{self.path}` is damaged ({how}): {self._remedy}")


def _place(entry: Mapping[str, Any], start: int) -> tuple[np.dtype, tuple[int, ...], int]:
    """Type and shape of a tensor, and where its data begin in the file."""
    dtype, shape, (first, end) = (
        np.dtype(DTYPES[entry["dtype"]]),
        tuple(entry["shape"]),
        entry["data_offsets"],
    )
    if first < 0 or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != end - first:
        raise ValueError(f"{end - first} bytes for {entry['dtype']} of shape {shape}")
    return dtype, shape, start + first


def tensor_parts(
    name: str, dtype: np.dtype, shape: tuple[int, ...], chunks: Iterable[np.ndarray]
) -> Iterator[bytes]:
    """The bytes of a safetensors file of one tensor, in parts, without ever holding the whole.

    Args:
        name: the tensor's.
        dtype: its type, one of `DTYPES`.
        shape: its shape.
        chunks: its entries along the first axis, some at a time.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    entry = {"dtype": NAMES[np.dtype(dtype)], "shape": list(shape), "data_offsets": [0, size]}
    header = json.dumps({name: entry}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    for chunk in chunks:
        yield np.ascontiguousarray(chunk, dtype).tobytes()
