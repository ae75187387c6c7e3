"""Read safetensors files with `read` instead of a memory map, whose pages count as the process's memory.

The format is public: 8 bytes with the header's length, a JSON header with each tensor's byte offsets, the
data.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "I64": np.int64, "F16": np.float16}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


class TensorFile:
    """An open safetensors file; processes forked from this one can go on using it.

    Args:
        path: the file.
        error: type of error to raise if the file is damaged; its message is one line.
        remedy: the end of that message: what to do.

    Raises:
        FileNotFoundError: the file does not exist, or (on a later read over NFS) has been removed since.
    """

    def __init__(self, path: Path, error: type[Exception], remedy: str) -> None:
        self.path, self._error, self._remedy = path, error, remedy
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115, kept open
        try:
            size = os.fstat(self._file.fileno()).st_size
            start = 8 + int.from_bytes(os.pread(self._file.fileno(), 8, 0), "little")
            if start > size:
                raise ValueError(f"{start - 8} bytes long")
            header = json.loads(self._read(8, start - 8))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self.tensors = {name: _place(entry, start) for name, entry in header.items()}
            end = start + max(entry["data_offsets"][1] for entry in header.values())
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise self.damaged(f"its header: {error}") from None
        except OSError as error:
            raise _gone(error) from None
        if size != end:
            raise self.damaged(f"expected {end} bytes, found {size}")

    def count(self, name: str) -> int:
        """Number of the tensor's entries along its first axis."""
        return self._tensor(name)[1][0]

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The tensor's entries `start` to `stop` along its first axis, a copy."""
        dtype, (count, *inner), offset = self._tensor(name)
        count = (count if stop is None else stop) - start
        size = math.prod(inner) * dtype.itemsize
        return np.ndarray((count, *inner), dtype, self._read(offset + start * size, count * size))

    def row_reader(self, name: str) -> Callable[[int], np.ndarray]:
        """A function that reads one entry along the tensor's first axis, a copy."""
        dtype, (_, *inner), _ = self._tensor(name)
        inner, size = tuple(inner), math.prod(inner) * dtype.itemsize
        read = self.bytes_reader(name)
        return lambda row: np.ndarray(inner, dtype, bytearray(read(row * size, row * size + size)))

    def bytes_reader(self, name: str) -> Callable[[int, int], bytes]:
        """A function that reads a range of a tensor's bytes."""
        offset, number = self._tensor(name)[2], self._file.fileno()

        def read(start: int, stop: int) -> bytes:
            try:
                found = os.pread(number, stop - start, offset + start)
            except OSError as error:
                raise _gone(error) from None
            if len(found) != stop - start:
                raise self.damaged("truncated since it was opened")
            return found

        return read

    def close(self) -> None:
        """Close the file; it cannot be read afterwards."""
        self._file.close()

    def _tensor(self, name: str) -> tuple[np.dtype, tuple[int, ...], int]:
        if name not in self.tensors:
            raise self.damaged(f"it has no tensor `{name}`")
        return self.tensors[name]

    def _read(self, offset: int, count: int) -> bytearray:
        content = bytearray(count)
        buffer = memoryview(content)
        while buffer:  # one read returns at most 2 GiB
            try:
                read = os.preadv(self._file.fileno(), [buffer], offset)
            except OSError as error:
                raise _gone(error) from None
            if not read:
                raise self.damaged("truncated since it was opened")
            buffer, offset = buffer[read:], offset + read
        return content

    def damaged(self, how: str) -> Exception:
        """The error to raise for a file that is damaged in this way."""
        return self._error(f"`{self.path}` is damaged ({how}): {self._remedy}")


def _place(entry: Mapping[str, Any], start: int) -> tuple[np.dtype, tuple[int, ...], int]:
    """Type and shape of a tensor, and the offset of its data in the file."""
    dtype, shape = np.dtype(DTYPES[entry["dtype"]]), tuple(entry["shape"])
    first, end = entry["data_offsets"]
    if first < 0 or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != end - first:
        raise ValueError(f"{end - first} bytes for {entry['dtype']} of shape {shape}")
    return dtype, shape, start + first


def _gone(error: OSError) -> OSError:
    """The error as FileNotFoundError if another machine has removed the open file over NFS (ESTALE)."""
    return FileNotFoundError(*error.args) if error.errno == errno.ESTALE else error


def text_tensor(names: Iterable[bytes]) -> np.ndarray:
    """Names as a tensor of bytes, one line per name."""
    return np.frombuffer(b"".join(name + b"\n" for name in names), dtype=np.uint8)


def encode_name(name: str) -> bytes:
    """Bytes of an image's name: UTF-8, with undecodable file-system bytes kept as they are."""
    return name.encode("utf-8", "surrogateescape")


def decode_names(lines: bytes) -> list[str]:
    """Names from lines of bytes, the inverse of `text_tensor`."""
    return bytes(lines).decode("utf-8", "surrogateescape").split("\n")[:-1]


def tensor_parts(
    name: str, dtype: np.dtype, shape: Sequence[int], chunks: Iterable[np.ndarray]
) -> Iterator[bytes]:
    """The bytes of a safetensors file with one tensor, in parts, never all in memory.

    Args:
        name: of the tensor.
        dtype: one of `DTYPES`.
        shape: its shape.
        chunks: consecutive pieces along the first axis.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    entry = {"dtype": NAMES[np.dtype(dtype)], "shape": list(shape), "data_offsets": [0, size]}
    header = json.dumps({name: entry}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    for chunk in chunks:
        yield np.ascontiguousarray(chunk, dtype).tobytes()
