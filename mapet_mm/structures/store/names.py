"""The names of a token store: look-ups from name to row and back that need no memory per name."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from safetensors.numpy import save

from mapet_mm.structures.tensor_files import TensorFile, decode_names, encode_name, text_tensor

# Only the first name of each block is kept in memory; a block is read to find a name in it.
BLOCK = 32


def names_file(names: Iterable[str]) -> bytes:
    """Contents of a safetensors file that maps names to rows; row i is the i-th name given.

    `text` has the names in byte order, one per line; `firsts` every 32nd name; `bounds` the offsets in `text`
    where their blocks begin and the last one ends. If the names were given in another order, `rows` has the
    row of each line, and `lines` the line of each row.

    Raises:
        ValueError: no names, an empty name, a name with a line break, or a duplicate name.
    """
    given = [encode_name(name) for name in names]
    if not given:
        raise ValueError("no image names given: check the dataset's data_root and annotation file")
    row_of_line = sorted(range(len(given)), key=given.__getitem__)
    encoded = [given[row] for row in row_of_line]
    _check_names(encoded)
    ends = np.cumsum([len(name) + 1 for name in encoded], dtype=np.int64)
    tensors = {
        "text": text_tensor(encoded),
        "firsts": text_tensor(encoded[::BLOCK]),
        "bounds": np.concatenate([[0], ends[BLOCK - 1 : -1 : BLOCK], ends[-1:]]).astype(np.int64),
    }
    rows = np.array(row_of_line, dtype=np.uint32)
    if (np.diff(rows.astype(np.int64)) < 0).any():
        tensors |= {"rows": rows, "lines": np.argsort(rows).astype(np.uint32)}
    return save(tensors)


def _check_names(encoded: Sequence[bytes]) -> None:
    for previous, name in zip([b"", *encoded], encoded, strict=False):
        if name == previous:
            reason = "is given twice" if name else "is empty"
            raise ValueError(f"image name {name.decode('utf-8', 'surrogateescape')!r} {reason}")
        if b"\n" in name:
            raise ValueError(f"image name {name.decode('utf-8', 'surrogateescape')!r} contains a line break")


class StoredNames(Sequence):
    """The names in a names file as a sequence by row, read from the file when accessed."""

    def __init__(self, file: TensorFile, count: int) -> None:
        self._file, self._count = file, count
        self._firsts = file.rows("firsts").tobytes().split(b"\n")[:-1]
        self._bounds = file.rows("bounds").tolist()
        # Kept in memory for look-ups: 4 bytes per name, only in stores whose rows are not in byte order.
        self._rows = file.rows("rows") if "rows" in file.tensors else None
        self._text = file.bytes_reader("text")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> str:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} rows")
        line = row % len(self)
        if self._rows is not None:
            line = int(self._file.rows("lines", line, line + 1)[0])
        return decode_names(self._block(line // BLOCK))[line % BLOCK]

    def __iter__(self) -> Iterator[str]:
        blocks = map(self._block, range(len(self._firsts)))
        names = (name for block in blocks for name in decode_names(block))
        if self._rows is None:
            return names
        by_line = list(names)
        return (by_line[line] for line in self._file.rows("lines"))

    def find(self, name: str) -> int | None:
        """Row of a name, or None if it is not among them."""
        key = encode_name(name)
        block = bisect_right(self._firsts, key) - 1
        if block < 0 or b"\n" in key:
            return None
        line = block * BLOCK
        if self._firsts[block] != key:
            text = self._block(block)
            position = text.find(b"\n" + key + b"\n")
            if position < 0:
                return None
            line += text.count(b"\n", 0, position + 1)
        return line if self._rows is None else int(self._rows[line])

    def _block(self, number: int) -> bytes:
        return self._text(self._bounds[number], self._bounds[number + 1])
