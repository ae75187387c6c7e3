"""The parts of a store: 1,024 rows each, token grids or squares, with a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped, UInt8, UInt64
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mapet_mm.utils.atomic_files import new_file
from mapet_mm.utils.errors import UserError

PART_ROWS = 1024
# States of a row.
PENDING, WRITTEN, SKIPPED = 0, 1, 2
# Names of what a row is, in a file.
GRIDS, SQUARES = "grids", "squares"
HOW_TO_RESTORE = (
    "restore it from a copy, or remove it and run tools/extract_tokens.py again (for squares, "
    "tools/store_images.py)"
)


class TokenStoreError(UserError, ValueError):
    """A token store cannot be made, read or written; the message is one line that says what to do."""


class Part(NamedTuple):
    """At most `PART_ROWS` rows: the hash of each image's name, its state and its values (ids or pixels).

    `skipped` says why images were skipped, by name.
    """

    names: UInt64[np.ndarray, " rows"]
    states: UInt8[np.ndarray, " rows"]
    values: Shaped[np.ndarray, "rows ..."]
    skipped: dict[str, str]

    def digest(self) -> str:
        """SHA-256 (hexadecimal) of all of it."""
        sha = hashlib.sha256(json.dumps(self.skipped).encode())
        for tensor in (self.names, self.states, self.values):
            sha.update(np.ascontiguousarray(tensor).data)
        return sha.hexdigest()


def empty_part(shape: tuple[int, ...], dtype: np.dtype, num_rows: int = PART_ROWS) -> Part:
    """A part whose rows, of this shape, are all pending."""
    names = np.zeros(num_rows, np.uint64)
    states = np.zeros(num_rows, np.uint8)
    return Part(names, states, np.zeros((num_rows, *shape), dtype), {})


def part_file(folder: Path, part: int, store_id: str) -> Path:
    """The file of a part. It has the store's id, so that no other store's is taken for it."""
    return folder / f"{part:05d}-{store_id}.safetensors"


def write_part(path: Path, part: Part, kind: str) -> None:
    """Write a part in one step, with its digest; `kind` is GRIDS or SQUARES."""
    about = json.dumps({"skipped": part.skipped, "sha256": part.digest()})
    tensors = {"names": part.names, "states": part.states, kind: part.values}
    with new_file(path) as partial:
        partial.touch()
        mode = partial.stat().st_mode
        try:
            save_file(tensors, partial, {"about": about})  # of two entries, the order would vary
        except SafetensorError as error:  # a full disk, too
            raise TokenStoreError(f"`{path}` could not be written: {error}") from None
        partial.chmod(mode)  # safetensors lets nobody but the owner read its files


def read_part(file: safe_open, path: Path, kind: str) -> Part:
    """Read a whole part; TokenStoreError if it is not as it was written."""
    names, states, values = (file.get_tensor(name) for name in ("names", "states", kind))
    part = Part(names, states, values, skipped_of(file))
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
