"""The image names of a store by row, in a file of their own that is never read as a whole."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
from jaxtyping import Int64, UInt64
from safetensors.numpy import save

from mapet_mm.structures.store_files import TokenStoreError
from mapet_mm.structures.tensor_file import TensorFile

# Every so many hashes one stays in memory: 160 KB for 1.3 M names.
HASH_STRIDE = 64
# Names read at once by a loop over all of them.
NAMES_AT_ONCE = 2**16


def name_hash(name: str) -> int:
    """A 64-bit hash of a name; of 1.3 M names two are alike once in 20 million stores."""
    return int.from_bytes(hashlib.blake2b(encode_name(name), digest_size=8).digest(), "little")


def name_hashes(names: Iterable[str]) -> UInt64[np.ndarray, " names"]:
    """`name_hash` of each name."""
    return np.fromiter(map(name_hash, names), "<u8")


def encode_name(name: str) -> bytes:
    """Encode a name as UTF-8; bytes that are not valid UTF-8 survive the round trip."""
    return name.encode("utf-8", "surrogateescape")


def names_file(names: Sequence[str]) -> bytes:
    """A safetensors file with names by row: their text, its ends, and their sorted hashes with the rows."""
    if not names:
        raise TokenStoreError("no image names given: check the dataset's data_root and annotation file")
    text = encode_name("".join(names))
    ends = np.cumsum([0, *(len(encode_name(name)) for name in names)], dtype="<u8")
    # Sorted, so that a name is found by bisection.
    hashes = name_hashes(names)
    rows = np.argsort(hashes, kind="stable")
    hashes = hashes[rows]
    equal = np.flatnonzero(hashes[1:] == hashes[:-1])
    if equal.size:
        raise TokenStoreError(f"image name {names[rows[equal[0] + 1]]!r} is given twice")
    tensors = {
        "text": np.frombuffer(text, "u1"),
        "ends": ends,
        "hashes": hashes,
        "rows": rows.astype("<u4"),
        "steps": hashes[::HASH_STRIDE].copy(),
    }
    return save(tensors)


class StoredNames(Sequence):
    """The names of a store by row, read from a `names_file` when they are needed.

    The file is opened once in a process and stays open; a copy that was pickled opens it again.

    Args:
        count: number of names.
        open_file: opens the file.
    """

    def __init__(self, count: int, open_file: Callable[[], TensorFile]) -> None:
        self._count = count
        self._open_file = open_file

    def __getstate__(self) -> dict:
        return {"_count": self._count, "_open_file": self._open_file}

    @cached_property
    def _file(self) -> TensorFile:
        return self._open_file()

    @cached_property
    def _every_stride(self) -> UInt64[np.ndarray, " strides"]:
        return self._file.rows("steps")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int | slice) -> str | list[str]:
        if not isinstance(row, slice):
            start = range(self._count)[row]
            return self[start : start + 1][0]
        rows = range(self._count)[row]
        ends = self._file.rows("ends", rows.start, rows.stop + 1).tolist()
        text = self._file.rows("text", ends[0], ends[-1]).tobytes()
        names = [text[start - ends[0] : end - ends[0]] for start, end in pairwise(ends)]
        return [name.decode("utf-8", "surrogateescape") for name in names]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, self._count, NAMES_AT_ONCE):
            yield from self[start : start + NAMES_AT_ONCE]

    def find(self, name: str) -> int | None:
        """Row of a name, or None if it is not among them."""
        key = np.uint64(name_hash(name))
        # The stretch of hashes that the name's would be in: only this is read.
        stretch = int(self._every_stride.searchsorted(key, "right")) - 1
        if stretch < 0:
            return None
        first = stretch * HASH_STRIDE
        near = self._file.rows("hashes", first, first + HASH_STRIDE)
        index = int(near.searchsorted(key))
        if index == len(near) or near[index] != key:
            return None
        return int(self._file.rows("rows", first + index, first + index + 1)[0])

    def find_all(self, names: Iterable[str]) -> Int64[np.ndarray, " names"]:
        """Rows of many names, -1 where a name is not among them."""
        keys = name_hashes(names)
        hashes = self._file.rows("hashes")
        rows = self._file.rows("rows").astype(np.int64)
        positions = np.searchsorted(hashes, keys).clip(max=self._count - 1)
        return np.where(hashes[positions] == keys, rows[positions], -1)

    def hashes(self) -> UInt64[np.ndarray, " names"]:
        """The hash of each name by row."""
        by_row = np.empty(self._count, np.uint64)
        by_row[self._file.rows("rows")] = self._file.rows("hashes")
        return by_row

    def ascending_stretches(self) -> list[int]:
        """The first row of each stretch of names in ascending order: one, and one more per extension."""
        firsts = [0]
        before = ""
        for row, name in enumerate(self):
            if name < before:
                firsts.append(row)
            before = name
        return firsts

    def ranges_under(self, prefix: str, firsts: Sequence[int]) -> list[tuple[int, int]]:
        """The rows `[start, stop)` whose names begin with a prefix, in each ascending stretch of names."""
        ranges = []
        for first, stop in pairwise([*firsts, self._count]):
            start = bisect_left(self, prefix, first, stop)
            end = bisect_left(self, True, start, stop, key=lambda name: not name.startswith(prefix))
            ranges.append((start, end))
        return ranges
