"""The image names of a token store, in one file that is read where it is needed and never as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt64
from safetensors.numpy import save

from mapet_mm.structures.store_parts import TokenStoreError

# Hashes between two that stay in memory: 160 KB for 1.3 M names.
STEP = 64
# Names read at once by a loop over all of them.
CHUNK = 2**16


def name_hashes(names: Iterable[str]) -> UInt64[np.ndarray, " names"]:
    """A 64-bit hash of each name; of 1.3 M names two are alike once in 20 million stores."""
    digests = (hashlib.blake2b(_encoded(name), digest_size=8).digest() for name in names)
    return np.frombuffer(b"".join(digests), "<u8")


def names_file(names: Sequence[str]) -> bytes:
    """A safetensors file with names by row: their text and its ends, and their sorted hashes with the rows.

    Raises:
        TokenStoreError: there are no names, or a name is given twice.
    """
    if not names:
        raise TokenStoreError("no image names given: check the dataset's data_root and annotation file")
    encoded, hashes = [_encoded(name) for name in names], name_hashes(names)
    rows = np.argsort(hashes, kind="stable")
    ordered = hashes[rows]
    if (same := np.flatnonzero(ordered[1:] == ordered[:-1])).size:
        raise TokenStoreError(f"image name {names[rows[same[0] + 1]]!r} is given twice")
    return save(
        {
            "text": np.frombuffer(b"".join(encoded), "u1"),
            "ends": np.cumsum([0, *map(len, encoded)], dtype="<u8"),
            "hashes": ordered,
            "rows": rows.astype("<u4"),
            "steps": ordered[::STEP].copy(),
        }
    )


class StoredNames(Sequence):
    """The names of a store as a sequence by row.

    Args:
        path: what `names_file` gave, as a file.
        count: number of names.
        opened: opens a safetensors file.
    """

    def __init__(self, path: Path, count: int, opened: Callable[[Path], AbstractContextManager[Any]]) -> None:
        self._path, self._count, self._opened = path, count, opened

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            rows = range(self._count)[row]
            return self._read(rows.start, rows.stop)
        (name,) = self[(place := range(self._count)[row]) : place + 1]
        return name

    def __iter__(self) -> Iterator[str]:
        for start in range(0, self._count, CHUNK):
            yield from self._read(start, min(start + CHUNK, self._count))

    def find(self, name: str) -> int | None:
        """Row of a name, or None if it is not among them."""
        key = name_hashes([name])[0]
        place = int(np.searchsorted(self._steps, key, side="right")) - 1
        if place < 0:
            return None
        near = slice(place * STEP, min((place + 1) * STEP, self._count))
        with self._opened(self._path) as file:
            found = np.flatnonzero(file.get_slice("hashes")[near] == key)
            return int(file.get_slice("rows")[near][found[0]]) if found.size else None

    def find_all(self, names: Iterable[str]) -> Int64[np.ndarray, " names"]:
        """Rows of many names, -1 where a name is not among them."""
        keys = name_hashes(names)
        with self._opened(self._path) as file:
            hashes, rows = file.get_tensor("hashes"), file.get_tensor("rows").astype(np.int64)
        places = np.searchsorted(hashes, keys).clip(max=self._count - 1)
        return np.where(hashes[places] == keys, rows[places], -1)

    @cached_property
    def _steps(self) -> UInt64[np.ndarray, " steps"]:
        with self._opened(self._path) as file:
            return file.get_tensor("steps")

    def _read(self, start: int, stop: int) -> list[str]:
        if stop <= start:
            return []
        with self._opened(self._path) as file:
            ends = file.get_slice("ends")[start : stop + 1].tolist()
            text = file.get_slice("text")[ends[0] : ends[-1]].tobytes()
        places = pairwise(end - ends[0] for end in ends)
        return [text[first:last].decode("utf-8", "surrogateescape") for first, last in places]


def _encoded(name: str) -> bytes:
    """UTF-8, with the bytes of a file system that are not kept as they are."""
    return name.encode("utf-8", "surrogateescape")
