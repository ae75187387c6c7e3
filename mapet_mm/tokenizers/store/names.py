"""The names of a token store: from an image's name to its row and back, with no memory per name."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from safetensors.numpy import save

from mapet_mm.tokenizers.tensor_files import TensorFile

# Only each block's first name is kept in memory; the others are read and searched a block at a time.
BLOCK = 32


def encode_name(name: str) -> bytes:
    """Bytes of a name as stored: UTF-8, with undecodable file-system bytes kept as they are."""
    return name.encode("utf-8", "surrogateescape")


def names_file(names: Iterable[str]) -> bytes:
    """Contents of a safetensors file that finds a name's row; rows are in the order of the names given.

    `text` has the names in byte order, a line each; `firsts` every 32nd of them, `bounds` where their blocks
    begin in `text` and where the last ends; `order`, only where the names were given in another order, the
    row of each line and the line of each row.

    Raises:
        ValueError: no names, an empty name, a name with a line break, or a name given twice.
    """
    given = [encode_name(name) for name in names]
    if not given:
        raise ValueError("no image names given: check the dataset's data_root and annotation file")
    row_of_line = sorted(range(len(given)), key=given.__getitem__)
    encoded = [given[row] for row in row_of_line]
    _check_names(encoded)
    ends = np.cumsum([len(name) + 1 for name in encoded], dtype=np.int64)
    tensors = {
        "text": _lines(encoded),
        "firsts": _lines(encoded[::BLOCK]),
        "bounds": np.concatenate([[0], ends[BLOCK - 1 : -1 : BLOCK], ends[-1:]]).astype(np.int64),
        "count": np.array([len(given)], dtype=np.int64),
    }
    rows = np.array(row_of_line, dtype=np.uint32)
    if (np.diff(rows.astype(np.int64)) < 0).any():
        tensors["order"] = np.stack([rows, np.argsort(rows).astype(np.uint32)], axis=1)
    return save(tensors)


def _check_names(encoded: Sequence[bytes]) -> None:
    for previous, name in zip([b"", *encoded], encoded, strict=False):
        if name == previous:
            reason = "is given twice" if name else "is empty"
            raise ValueError(f"image name {name.decode('utf-8', 'surrogateescape')!r} {reason}")
        if b"\n" in name:
            raise ValueError(f"image name {name.decode('utf-8', 'surrogateescape')!r} contains a line break")


def _lines(encoded: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"\n".join(encoded) + b"\n", dtype=np.uint8)


class StoredNames(Sequence):
    """The names in a names file as a sequence by row, read from the file as they are asked for."""

    def __init__(self, file: TensorFile) -> None:
        self._file = file
        self._firsts = file.rows("firsts").tobytes().split(b"\n")[:-1]
        self._bounds = file.rows("bounds").tolist()
        self._count = int(file.rows("count")[0])
        self._order = None if file.shape("order") is None else file.row_reader("order")
        self._read = file.text_reader("text")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> str:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} rows")
        row = row % len(self)
        block, line = divmod(row if self._order is None else int(self._order(row)[1]), BLOCK)
        return self._decoded(block)[line]

    def __iter__(self) -> Iterator[str]:
        names = (name for block in range(len(self._firsts)) for name in self._decoded(block))
        if self._order is None:
            return names
        by_line = list(names)
        return (by_line[line] for line in self._file.rows("order")[:, 1])

    def find(self, name: str) -> int | None:
        """Row of a name, or None if it is not among them."""
        line = self._find_line(name)
        return line if line is None or self._order is None else int(self._order(line)[0])

    def _find_line(self, name: str) -> int | None:
        key = encode_name(name)
        block = bisect_right(self._firsts, key) - 1
        if block < 0 or b"\n" in key:
            return None
        if self._firsts[block] == key:
            return block * BLOCK
        text = self._text(block)
        position = text.find(b"\n" + key + b"\n")
        return None if position < 0 else block * BLOCK + text.count(b"\n", 0, position + 1)

    def _text(self, block: int) -> bytes:
        return self._read(self._bounds[block], self._bounds[block + 1])

    def _decoded(self, block: int) -> list[str]:
        return self._text(block).decode("utf-8", "surrogateescape").split("\n")[:-1]
