"""The name index of a token store: from an image's name to its row, with no memory per name."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

# Only each block's first name is kept in memory; the others are read and searched a block at a time.
BLOCK = 128
NAMES_FILE = "names.txt"
BLOCKS_FILE = "blocks.txt"
# Only there when the names were not given in byte order: row of each line of `names.txt`, line of each row.
ORDER_FILE = "order.bin"
NAME_FILES = (NAMES_FILE, BLOCKS_FILE, ORDER_FILE)


def encode_name(name: str) -> bytes:
    """Bytes of a name as stored: UTF-8, with undecodable file-system bytes kept as they are."""
    return name.encode("utf-8", "surrogateescape")


def index_names(names: Iterable[str]) -> dict[str, bytes]:
    """Contents of the files that find a name's row; rows are in the order in which the names are given.

    Raises:
        ValueError: no names, an empty name, a name with a line break, or a name given twice.
    """
    given = [encode_name(name) for name in names]
    if not given:
        raise ValueError("no image names given: check the dataset's data_root and annotation file")
    row_of_line = sorted(range(len(given)), key=given.__getitem__)
    encoded = [given[row] for row in row_of_line]
    _check_names(encoded)
    files = {NAMES_FILE: _names_text(encoded), BLOCKS_FILE: _blocks_text(encoded)}
    rows = np.array(row_of_line, dtype="uint32")
    if (np.diff(rows.astype(np.int64)) < 0).any():
        files[ORDER_FILE] = np.stack([rows, np.argsort(rows).astype("uint32")]).tobytes()
    return files


def _check_names(encoded: Sequence[bytes]) -> None:
    for previous, name in zip([b"", *encoded], encoded, strict=False):
        if name == previous:
            reason = "is given twice" if name else "is empty"
            raise ValueError(f"image name {name.decode('utf-8', 'surrogateescape')!r} {reason}")
        if b"\n" in name:
            raise ValueError(f"image name {name.decode('utf-8', 'surrogateescape')!r} contains a line break")


def _names_text(encoded: Sequence[bytes]) -> bytes:
    """Contents of `names.txt`: a name a line, in byte order."""
    return b"\n".join(encoded) + b"\n"


def _blocks_text(encoded: Sequence[bytes]) -> bytes:
    """Contents of `blocks.txt`: byte offset in `names.txt` and every 128th name, a line each."""
    lines, offset = [], 0
    for start in range(0, len(encoded), BLOCK):
        lines.append(b"%d\t%s\n" % (offset, encoded[start]))
        offset += sum(map(len, encoded[start : start + BLOCK])) + len(encoded[start : start + BLOCK])
    return b"".join(lines)


class TokenNames(Sequence):
    """The names of a token store as a sequence by row, read from the file as they are asked for.

    Args:
        files: path of each of `NAME_FILES`; the order file may not exist.
        num_names: names in them.
    """

    def __init__(self, files: Mapping[str, Path], num_names: int) -> None:
        lines = [line.split(b"\t", 1) for line in files[BLOCKS_FILE].read_bytes().split(b"\n")[:-1]]
        # Unbuffered and read at explicit offsets, so that processes forked from this one can share it.
        self._file = open(files[NAMES_FILE], "rb", buffering=0)  # noqa: SIM115
        self._first = [name for _, name in lines]
        self._bounds = [*(int(offset) for offset, _ in lines), os.fstat(self._file.fileno()).st_size]
        self._num_names = num_names
        order = files[ORDER_FILE]
        self._order = np.memmap(order, "uint32", "r", shape=(2, num_names)) if order.exists() else None

    def __len__(self) -> int:
        return self._num_names

    def __getitem__(self, row: int) -> str:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a token store with {len(self)} rows")
        row = row % len(self)
        block, line = divmod(row if self._order is None else int(self._order[1, row]), BLOCK)
        return self._decoded(block)[line]

    def __iter__(self) -> Iterator[str]:
        names = (name for block in range(len(self._first)) for name in self._decoded(block))
        if self._order is None:
            return names
        by_line = list(names)
        return (by_line[line] for line in self._order[1])

    def find(self, name: str) -> int | None:
        """Row of a name, or None if the store does not have it."""
        line = self._find_line(name)
        return line if line is None or self._order is None else int(self._order[0, line])

    def _find_line(self, name: str) -> int | None:
        key = encode_name(name)
        block = bisect_right(self._first, key) - 1
        if block < 0 or b"\n" in key:
            return None
        if self._first[block] == key:
            return block * BLOCK
        text = self._text(block)
        position = text.find(b"\n%s\n" % key)
        return None if position < 0 else block * BLOCK + text.count(b"\n", 0, position + 1)

    def _text(self, block: int) -> bytes:
        start, end = self._bounds[block], self._bounds[block + 1]
        return os.pread(self._file.fileno(), end - start, start)

    def _decoded(self, block: int) -> list[str]:
        return self._text(block).decode("utf-8", "surrogateescape").split("\n")[:-1]
