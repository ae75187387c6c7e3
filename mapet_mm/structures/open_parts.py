"""Rows of a store's parts by their number; each part is opened once in a process and stays open."""

from __future__ import annotations

import resource
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from math import prod

import numpy as np

from mapet_mm.structures.store_files import PART_ROWS, PENDING, WRITTEN
from mapet_mm.structures.tensor_file import TensorFile

# A store that was replaced is noticed after this time, and whenever a part is opened that is gone.
RECHECK_SECONDS = 5.0
# As many files as a process may open, if the system lets it: 14 M images have 27,000 parts.
MOST_FILES = 2**16


@cache
def most_parts() -> int:
    """How many parts each of a process's readers keeps open: a third of the files that it may open.

    The usual limit, 1,024, is below ImageNet's 1,252 parts, and any process may raise its own to the hard one
    (`ulimit -Hn`).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(wanted // 3, 1)


class OpenPart:
    """An open file of a part, from which single rows are read."""

    def __init__(self, file: TensorFile, tensor: str) -> None:
        self.file = file
        self.states = file.rows("states").tobytes()
        self._first_byte, shape, dtype = file.place(tensor)
        self._row_bytes = prod(shape[1:]) * dtype.itemsize

    def state(self, slot: int) -> int:
        """State of a row of the part: PENDING, WRITTEN or SKIPPED."""
        return self.states[slot] if slot < len(self.states) else PENDING

    def name_hash(self, slot: int) -> int:
        """Hash of the name of the image in a slot."""
        return int(self.file.rows("names", slot, slot + 1)[0])

    def read(self, slot: int, out: np.ndarray) -> None:
        """Read a row into an array."""
        self.file.read_into(out, self._first_byte + slot * self._row_bytes)


class OpenParts:
    """Reads single rows of parts. Pickled, it forgets what it has opened; after a fork, it goes on.

    Args:
        open_file: opens the file of a part; None if it is not there.
        tensor: name of the rows in it.
        require_unreplaced: raises if another store has taken the place of this one.
    """

    def __init__(
        self,
        open_file: Callable[[int], TensorFile | None],
        tensor: str,
        require_unreplaced: Callable[[], None],
    ) -> None:
        self._open_file = open_file
        self._tensor = tensor
        self._require_unreplaced = require_unreplaced
        self.forget()

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_parts": OrderedDict(), "_checked": 0.0}

    def forget(self) -> None:
        """Close all parts."""
        self._parts: OrderedDict[int, OpenPart] = OrderedDict()
        self._checked = 0.0

    def find(self, row: int) -> tuple[OpenPart | None, int]:
        """The part that has a row, and the row's slot in it; None if there is no such part yet.

        A part in which the row is not written is opened again: another process may have replaced it.
        """
        now = time.monotonic()
        if now > self._checked + RECHECK_SECONDS:
            self._require_unreplaced()
            self._checked = now
        number, slot = divmod(row, PART_ROWS)
        part = self._parts.get(number)
        if part is None or part.state(slot) != WRITTEN:
            part = self._open(number)
        else:
            self._parts.move_to_end(number)
        return part, slot

    def _open(self, number: int) -> OpenPart | None:
        self._parts.pop(number, None)
        file = self._open_file(number)
        if file is None:
            return None
        part = OpenPart(file, self._tensor)
        self._parts[number] = part
        if len(self._parts) > most_parts():
            self._parts.popitem(last=False)
        return part

    def read(self, row: int, out: np.ndarray) -> bool:
        """Read a row into an array; False, and nothing is read, if it is not written."""
        part, slot = self.find(row)
        if part is None or part.state(slot) != WRITTEN:
            return False
        part.read(slot, out)
        return True
