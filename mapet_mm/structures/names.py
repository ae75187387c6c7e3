"""Names of images: paths relative to a folder, and the file of a store's names, never read as a whole."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt64
from safetensors.numpy import save

from mapet_mm.structures.tensor_file import TensorFile, TokenStoreError

# Every so many hashes one stays in memory: 160 KB for 1.3 M names.
HASH_STRIDE = 64
HASH_BYTES = 8
# Names read at once by a loop over all of them.
NAMES_AT_ONCE = 2**16


def relative_name(img_path: str | os.PathLike, root: str | os.PathLike) -> str | None:
    """Path of an image relative to a folder, '/'-separated, or None if it is not under it.

    Symbolic links below the folder are not resolved: their own names count. Where the paths alone do not lead
    from one to the other, or go up (`link/..` is not the folder of the link), both are resolved.
    """
    path = os.fspath(img_path)
    name = os.path.relpath(path, root)
    if _leaves(name) or os.pardir in path.split(os.sep):
        name = os.path.relpath(os.path.realpath(path), os.path.realpath(root))
    return None if _leaves(name) else name.replace(os.sep, "/")


def _leaves(name: str) -> bool:
    """True if a relative path is the folder itself or leads out of it."""
    return name.split(os.sep)[0] in (os.curdir, os.pardir)


def relative_names(
    paths: Iterable[str], root: str | os.PathLike | None, name_of: Callable[[str], str]
) -> Iterator[str]:
    """Names of many images below a folder; a million in half a second where the paths are plain.

    Args:
        paths: of the images.
        root: the folder.
        name_of: gives the name of any other path, or raises an error.
    """
    prefix = os.path.join(root or "", "")
    for path in paths:
        name = path[len(prefix) :]
        is_plain = prefix and path.startswith(prefix) and "/." not in f"/{name}" and "//" not in f"/{name}"
        yield name if is_plain else name_of(path)


def read_lines(file: str | os.PathLike) -> list[str]:
    """The lines of a list of images, without empty ones.

    A name may hold U+2028 and other characters at which `str.splitlines` would end a line.
    """
    return [line for line in Path(file).read_text().split("\n") if line]


def encode_name(name: str) -> bytes:
    """Encode a name as UTF-8; bytes that are not valid UTF-8 survive the round trip."""
    return name.encode("utf-8", "surrogateescape")


def name_hash(name: str) -> bytes:
    """A 64-bit hash of a name, little-endian; of 1.3 M names two are alike once in 20 million stores."""
    return blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()


def name_hashes(names: Iterable[str]) -> UInt64[np.ndarray, " names"]:
    """`name_hash` of each name."""
    hashes = bytearray()
    for name in names:
        hashes += name_hash(name)
    return np.frombuffer(hashes, "<u8")


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
    def _every_stride(self) -> array:
        return array("Q", self._file.rows("steps").tobytes())

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

    def find(self, key: bytes) -> int | None:
        """Row of the name with a `name_hash`, or None if it is not among them."""
        # The stretch of hashes that the name's would be in: only this is read.
        stretch = bisect_right(self._every_stride, int.from_bytes(key, "little")) - 1
        if stretch < 0:
            return None
        first = stretch * HASH_STRIDE
        near = self._file.read_bytes("hashes", first, first + HASH_STRIDE)
        place = near.find(key)
        while place % HASH_BYTES and place > 0:  # across two hashes
            place = near.find(key, place + 1)
        if place < 0:
            return None
        index = first + place // HASH_BYTES
        return int.from_bytes(self._file.read_bytes("rows", index, index + 1), "little")

    def find_all(self, names: Iterable[str]) -> Int64[np.ndarray, " names"]:
        """Rows of many names, -1 where a name is not among them."""
        keys = name_hashes(names)
        hashes = self._file.rows("hashes")
        rows = self._file.rows("rows").astype(np.int64)
        positions = np.searchsorted(hashes, keys).clip(max=self._count - 1)
        return np.where(hashes[positions] == keys, rows[positions], -1)

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
