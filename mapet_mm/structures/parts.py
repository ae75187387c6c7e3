"""What is kept of each image: rows of one shape and type, in files of some rows each, that any process fills.

A file is a part: `parts/00017-<id>.safetensors`, replaced in one step. It has, for each of its rows, the hash
of the image's name, a state (pending, written or skipped) and the values; the reasons of what was skipped;
and a digest. Token grids, squares, sampled features and the features of an evaluation are kept so.
"""

from __future__ import annotations

import json
import os
import re
import resource
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped, UInt8, UInt64
from safetensors import SafetensorError
from safetensors.numpy import save_file

from mapet_mm.structures.names import name_hashes
from mapet_mm.structures.tensor_file import TensorFile, TokenStoreError, damage_error
from mapet_mm.utils.atomic_files import new_file

# States of a row.
PENDING, WRITTEN, SKIPPED = 0, 1, 2
# As many files as a process may open, if the system lets it: 14 M images have 27,000 parts.
MOST_FILES = 2**16


class Part(NamedTuple):
    """Rows of a file: the hash of each image's name, its state and its values (ids, pixels or features).

    `skipped` says why images were skipped, by name.
    """

    names: UInt64[np.ndarray, " rows"]
    states: UInt8[np.ndarray, " rows"]
    values: Shaped[np.ndarray, "rows ..."]
    skipped: dict[str, str]

    @classmethod
    def empty(cls, num_rows: int, shape: tuple[int, ...], dtype: np.dtype) -> Part:
        """Rows of a shape that are all pending."""
        values = np.zeros((num_rows, *shape), dtype)
        return cls(np.zeros(num_rows, np.uint64), np.zeros(num_rows, np.uint8), values, {})

    def digest(self) -> str:
        """SHA-256 (hexadecimal) of all of it."""
        sha = sha256(json.dumps(self.skipped).encode())
        for tensor in (self.names, self.states, self.values):
            sha.update(np.ascontiguousarray(tensor).data)
        return sha.hexdigest()

    @classmethod
    def read(cls, file: TensorFile, kind: str) -> Part:
        """Read a whole part; TokenStoreError if it is not as it was written."""
        about = file.about()
        part = cls(file.rows("names"), file.rows("states"), file.rows(kind), about["skipped"])
        if part.digest() != about["sha256"]:
            raise damage_error(file.path, "it has changed since it was written")
        return part

    def write(self, path: Path, kind: str) -> None:
        """Write the part in one step, with its digest; `kind` names the values."""
        about = json.dumps({"skipped": self.skipped, "sha256": self.digest()})
        tensors = {"names": self.names, "states": self.states, kind: self.values}
        with new_file(path) as partial:
            partial.touch()
            mode = partial.stat().st_mode
            try:
                save_file(tensors, partial, {"about": about})  # of two entries, the order would vary
            except SafetensorError as error:
                number = re.search(r"\(os error (\d+)\)", str(error))  # such as that of a full disk
                if number is None:
                    raise TokenStoreError(f"`{path}` could not be written: {error}") from None
                raise OSError(int(number[1]), os.strerror(int(number[1])), os.fspath(path)) from None
            partial.chmod(mode)  # safetensors lets nobody but the owner read its files

    def followed_by(self, rest: Part) -> Part:
        """The rows of this part, then those of a longer one."""
        count = len(self.states)
        names = np.concatenate([self.names, rest.names[count:]])
        states = np.concatenate([self.states, rest.states[count:]])
        values = np.concatenate([self.values, rest.values[count:]])
        return Part(names, states, values, self.skipped)


class Parts:
    """Rows of one shape and type, one for each image, in files that are opened once and stay open.

    Any number of processes may read and update the parts at once, and die at any time. Pickled, it forgets
    what it has opened; after a fork, it goes on.

    Args:
        folder: has the files in `parts`.
        part_id: in the files' names, so that no other store's are taken for these.
        kind: the name of the values in a file.
        shape: of a row.
        dtype: of a row.
        names: of all rows, in order.
        part_rows: rows of a file.
    """

    # Whether rows of other images are an error; if not, they count as pending.
    refuses_others = True

    def __init__(
        self,
        folder: Path,
        part_id: str,
        kind: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        names: Sequence[str],
        part_rows: int,
    ) -> None:
        self.folder = folder
        self.kind = kind
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.names = names
        self.part_rows = part_rows
        self._part_id = part_id
        # The file of each part, and the states in it.
        self._open: dict[int, tuple[TensorFile, bytes]] = {}

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open": {}}

    # What kinds of parts do in their own way.

    def lock(self) -> AbstractContextManager:
        """Held by whoever reads a part in order to replace it; nothing where all would write the same."""
        return nullcontext()

    def require_unreplaced(self) -> None:
        """Raise TokenStoreError if the folder was made anew since it was opened."""

    def empty(self, part: int) -> Part:
        """What a part is before anything is written. It has room for the rows by which names are extended."""
        return Part.empty(self.part_rows, self.shape, self.dtype)

    # For all kinds:

    def __len__(self) -> int:
        """Number of parts."""
        return -(-len(self.names) // self.part_rows)

    def part_range(self, part: int) -> range:
        """The rows in a part."""
        first = part * self.part_rows
        return range(first, min(first + self.part_rows, len(self.names)))

    def names_in(self, part: int) -> list[str]:
        """The names of a part's rows."""
        rows = self.part_range(part)
        return list(self.names[rows.start : rows.stop])

    def file(self, part: int) -> Path:
        """The file of a part."""
        return self.folder / "parts" / f"{part:05d}-{self._part_id}.safetensors"

    def open(self, part: int) -> TensorFile | None:
        """The file of a part as it is now; None if it is not there yet."""
        try:
            return TensorFile(self.file(part))
        except FileNotFoundError:
            self.require_unreplaced()
            return None

    def states(self, part: int) -> UInt8[np.ndarray, " rows"]:
        """The state of each row of a part as it is now: PENDING, WRITTEN or SKIPPED."""
        num_rows = len(self.part_range(part))
        file = self.open(part)
        states = np.zeros(num_rows, np.uint8)
        if file is not None:
            stored = file.rows("states", 0, num_rows)
            states[: len(stored)] = stored
        return states

    def all_states(self) -> UInt8[np.ndarray, " rows"]:
        """The state of each row of all parts."""
        return np.concatenate([self.states(part) for part in range(len(self))])

    def skipped_in(self, part: int) -> dict[str, str]:
        """Images of a part that were skipped, by name, with the reason."""
        file = self.open(part)
        return {} if file is None else file.about()["skipped"]

    @property
    def skipped(self) -> dict[str, str]:
        """Images that were skipped, by name, with the reason."""
        skipped: dict[str, str] = {}
        for part in range(len(self)):
            skipped.update(self.skipped_in(part))
        return skipped

    def file_of(self, row: int, key: bytes | None = None) -> tuple[TensorFile | None, int]:
        """The open file that has a row, and the row's state; None, and PENDING, if there is no such file yet.

        A part in which the row is not written is opened again: another process may have replaced it. A part
        that is opened has to have the row for the image whose `name_hash` is `key`, if that is given.
        """
        part, slot = divmod(row, self.part_rows)
        file, states = self._open.get(part, (None, b""))
        if slot < len(states) and states[slot] == WRITTEN:
            return file, WRITTEN
        self._open.pop(part, None)
        file = self.open(part)
        if file is None:
            return None, PENDING
        states = file.rows("states").tobytes()
        state = states[slot] if slot < len(states) else PENDING
        if key is not None and state != PENDING and file.read_bytes("names", slot, slot + 1) != key:
            raise damage_error(file.path, f"row {row} has the {self.kind} of another image")
        if states == all_written(len(states)):
            states = all_written(len(states))  # the same object for all such parts
        if len(self._open) >= most_parts():
            del self._open[next(iter(self._open))]  # the one that was opened first
        self._open[part] = file, states
        return file, state

    def read_row(self, row: int, out: np.ndarray, skip: int = 0) -> bool:
        """Read a row into an array; False, and nothing is read, if it is not written.

        A smaller array gets the piece of the row that begins after `skip` bytes.
        """
        file, state = self.file_of(row)
        if state != WRITTEN:
            return False
        file.read_row(self.kind, row % self.part_rows, out, skip)
        return True

    def read_part(self, part: int) -> Part:
        """A whole part, checked against its digest and its images' names; an empty one if it is not there."""
        content = self.empty(part)
        file = self.open(part)
        if file is None:
            return content
        stored = Part.read(file, self.kind)
        if len(stored.states) < len(content.states):  # the names were extended since
            stored = stored.followed_by(content)
        hashes = name_hashes(self.names_in(part))
        states = stored.states[: len(hashes)]
        is_other = (stored.names[: len(hashes)] != hashes) & (states != PENDING)
        if is_other.any():
            if self.refuses_others:
                raise damage_error(file.path, f"it has the {self.kind} of other images")
            states[is_other] = PENDING
        return stored

    def update(
        self, part: int, slots: Sequence[int], values: Sequence[np.ndarray], reasons: Mapping[int, str]
    ) -> None:
        """Replace a part by itself with some rows written and others skipped; it is then on disk.

        Args:
            part: its index.
            slots: of the values in the part.
            values: a row for each of them.
            reasons: why images were skipped, by slot.
        """
        self.require_unreplaced()
        with self.lock():
            content = self.read_part(part)
            names = self.names_in(part)
            content.names[: len(names)] = name_hashes(names)
            for slot, value in zip(slots, values, strict=True):
                content.values[slot] = value
                content.states[slot] = WRITTEN
                content.skipped.pop(names[slot], None)
            for slot, reason in reasons.items():
                content.states[slot] = SKIPPED
                content.skipped[names[slot]] = reason
            # In order, so that equal parts have equal bytes whoever wrote them.
            content = content._replace(skipped=dict(sorted(content.skipped.items())))
            content.write(self.file(part), self.kind)
        self._open.pop(part, None)

    def verify(self) -> None:
        """Raise TokenStoreError if a part has changed since it was written, or is of other images."""
        for part in range(len(self)):
            self.read_part(part)


@cache
def all_written(num_rows: int) -> bytes:
    """The states of a part in which nothing is pending or skipped."""
    return bytes([WRITTEN] * num_rows)


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
