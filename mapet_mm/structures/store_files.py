"""The files of a token store: its names, and parts with the ids of 1,024 rows, each with a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int64, UInt8, UInt64
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.errors import UserError

PART_ROWS = 1024
# States of a row.
PENDING, WRITTEN, SKIPPED = 0, 1, 2
HOW_TO_RESTORE = "restore it from a copy, or remove it and run `mapet-mm extract-tokens` again"
# Every so many hashes one stays in memory: 160 KB for 1.3 M names.
HASH_STRIDE = 64
# Names read at once by a loop over all of them.
NAMES_AT_ONCE = 2**16


class TokenStoreError(UserError, ValueError):
    """A token store cannot be made, read or written; the message is one line that says what to do."""


class Part(NamedTuple):
    """`PART_ROWS` rows: the hash of each image's name, its state and its ids; why images were skipped."""

    names: UInt64[np.ndarray, " rows"]
    states: UInt8[np.ndarray, " rows"]
    grids: Int[np.ndarray, "rows height width"]
    skipped: dict[str, str]

    def digest(self) -> str:
        """SHA-256 (hexadecimal) of all of it."""
        sha = hashlib.sha256(json.dumps(self.skipped).encode())
        for tensor in (self.names, self.states, self.grids):
            sha.update(np.ascontiguousarray(tensor).data)
        return sha.hexdigest()


def empty_part(grid: tuple[int, int], dtype: np.dtype) -> Part:
    """A part whose rows are all pending."""
    names = np.zeros(PART_ROWS, np.uint64)
    states = np.zeros(PART_ROWS, np.uint8)
    return Part(names, states, np.zeros((PART_ROWS, *grid), dtype), {})


def write_part(path: Path, part: Part) -> None:
    """Write a part in one step, with its digest."""
    about = json.dumps({"skipped": part.skipped, "sha256": part.digest()})
    tensors = {"names": part.names, "states": part.states, "grids": part.grids}
    replace_file(path, save(tensors, {"about": about}))  # of two entries, the order would vary


def read_part(file: safe_open, path: Path) -> Part:
    """Read a whole part; TokenStoreError if it is not as it was written."""
    names, states, grids = (file.get_tensor(name) for name in ("names", "states", "grids"))
    part = Part(names, states, grids, skipped_of(file))
    if part.digest() != json.loads(file.metadata()["about"])["sha256"]:
        raise damage_error(path, "it has changed since it was written")
    return part


def skipped_of(file: safe_open) -> dict[str, str]:
    """Images of a part that were skipped, by name, with the reason."""
    return json.loads(file.metadata()["about"])["skipped"]


@contextmanager
def open_file(path: Path) -> Iterator[safe_open]:
    """Open a file of a store; TokenStoreError if it is truncated."""
    try:
        with safe_open(path, "numpy") as file:
            yield file
    except SafetensorError as error:
        raise damage_error(path, str(error)) from None


def damage_error(path: Path, how: str) -> TokenStoreError:
    """The error of a file of a store that cannot be used."""
    return TokenStoreError(f"token store file `{path}` is damaged ({how}): {HOW_TO_RESTORE}")


def name_hashes(names: Iterable[str]) -> UInt64[np.ndarray, " names"]:
    """A 64-bit hash of each name; of 1.3 M names two are alike once in 20 million stores."""
    digests = (hashlib.blake2b(encode_name(name), digest_size=8).digest() for name in names)
    return np.fromiter(digests, "V8").view("<u8")


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
    """The names of a store by row, read from a `names_file` when they are needed and never as a whole."""

    def __init__(
        self, path: Path, count: int, open_file: Callable[[Path], AbstractContextManager[Any]]
    ) -> None:
        self._path = path
        self._count = count
        self._open_file = open_file

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int | slice) -> str | list[str]:
        if not isinstance(row, slice):
            start = range(self._count)[row]
            return self[start : start + 1][0]
        rows = range(self._count)[row]
        with self._open_file(self._path) as file:
            ends = file.get_slice("ends")[rows.start : rows.stop + 1].tolist()
            text = file.get_slice("text")[ends[0] : ends[-1]].tobytes()
        names = [text[start - ends[0] : end - ends[0]] for start, end in pairwise(ends)]
        return [name.decode("utf-8", "surrogateescape") for name in names]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, self._count, NAMES_AT_ONCE):
            yield from self[start : start + NAMES_AT_ONCE]

    def find(self, name: str) -> int | None:
        """Row of a name, or None if it is not among them."""
        key = name_hashes([name])[0]
        # The stretch of hashes that the name's would be in: only this is read.
        stretch = int(np.searchsorted(self._every_stride, key, side="right")) - 1
        if stretch < 0:
            return None
        near = slice(stretch * HASH_STRIDE, min((stretch + 1) * HASH_STRIDE, self._count))
        with self._open_file(self._path) as file:
            found = np.flatnonzero(file.get_slice("hashes")[near] == key)
            if not found.size:
                return None
            return int(file.get_slice("rows")[near][found[0]])

    def find_all(self, names: Iterable[str]) -> Int64[np.ndarray, " names"]:
        """Rows of many names, -1 where a name is not among them."""
        keys = name_hashes(names)
        with self._open_file(self._path) as file:
            hashes = file.get_tensor("hashes")
            rows = file.get_tensor("rows").astype(np.int64)
        positions = np.searchsorted(hashes, keys).clip(max=self._count - 1)
        return np.where(hashes[positions] == keys, rows[positions], -1)

    def hashes(self) -> UInt64[np.ndarray, " names"]:
        """The hash of each name by row."""
        by_row = np.empty(self._count, np.uint64)
        with self._open_file(self._path) as file:
            by_row[file.get_tensor("rows")] = file.get_tensor("hashes")
        return by_row

    @cached_property
    def _every_stride(self) -> UInt64[np.ndarray, " strides"]:
        with self._open_file(self._path) as file:
            return file.get_tensor("steps")
