"""The name index of a token store: from an image's name to its row, with no memory per name."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

# Only each block's first name is kept in memory; the others are read and searched a block at a time.
BLOCK = 128
NAMES_FILE = "names.txt"
BLOCKS_FILE = "blocks.txt"


def encode_name(name: str) -> bytes:
    """Bytes of a name as stored: UTF-8, with undecodable file-system bytes kept as they are."""
    return name.encode("utf-8", "surrogateescape")


def sorted_names(names: Iterable[str]) -> list[bytes]:
    """Encoded names in byte order, which is the order of the rows.

    Raises:
        ValueError: no names, an empty name, a name with a line break, or a name given twice.
    """
    encoded = sorted(map(encode_name, names))
    if not encoded:
        raise ValueError("no image names given: check the dataset's data_root and annotation file")
    for previous, name in zip([b"", *encoded], encoded, strict=False):
        if name == previous:
            reason = "is given twice" if name else "is empty"
            raise ValueError(f"image name {name.decode('utf-8', 'surrogateescape')!r} {reason}")
        if b"\n" in name:
            raise ValueError(f"image name {name.decode('utf-8', 'surrogateescape')!r} contains a line break")
    return encoded


def names_text(encoded: Sequence[bytes]) -> bytes:
    """Contents of `names.txt`: a name a line, in the order of the rows."""
    return b"\n".join(encoded) + b"\n"


def blocks_text(encoded: Sequence[bytes]) -> bytes:
    """Contents of `blocks.txt`: byte offset in `names.txt` and name of every 128th row, a line each."""
    lines, offset = [], 0
    for start in range(0, len(encoded), BLOCK):
        lines.append(b"%d\t%s\n" % (offset, encoded[start]))
        offset += sum(map(len, encoded[start : start + BLOCK])) + len(encoded[start : start + BLOCK])
    return b"".join(lines)


class TokenNames(Sequence):
    """The sorted names of a token store as a sequence by row, read from the file as they are asked for.

    Args:
        folder: the token store's directory.
        num_names: names in it.
    """

    def __init__(self, folder: Path, num_names: int) -> None:
        lines = [line.split(b"\t", 1) for line in (folder / BLOCKS_FILE).read_bytes().split(b"\n")[:-1]]
        # Unbuffered and read at explicit offsets, so that processes forked from this one can share it.
        self._file = open(folder / NAMES_FILE, "rb", buffering=0)  # noqa: SIM115
        self._first = [name for _, name in lines]
        self._bounds = [*(int(offset) for offset, _ in lines), os.fstat(self._file.fileno()).st_size]
        self._num_names = num_names

    def __len__(self) -> int:
        return self._num_names

    def __getitem__(self, row: int) -> str:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a token store with {len(self)} rows")
        block, line = divmod(row % len(self), BLOCK)
        return self._decoded(block)[line]

    def __iter__(self) -> Iterator[str]:
        for block in range(len(self._first)):
            yield from self._decoded(block)

    def find(self, name: str) -> int | None:
        """Row of a name, or None if the store does not have it."""
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
