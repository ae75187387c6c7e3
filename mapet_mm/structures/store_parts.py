"""The parts of a token store: files with the ids of 1,024 rows each, whole or not there, and checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, UInt8, UInt64
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.errors import UserError

PART_ROWS = 1024
# States of a row.
MISSING, WRITTEN, SKIPPED = 0, 1, 2
RESTORE = "restore it from a copy, or remove it and run tools/extract_tokens.py again"


class TokenStoreError(UserError, ValueError):
    """A token store cannot be made, read or written; the message is one line that says what to do."""


class Part(NamedTuple):
    """`PART_ROWS` rows: the hash of each image's name, its state and its ids; why images were skipped."""

    names: UInt64[np.ndarray, " rows"]
    states: UInt8[np.ndarray, " rows"]
    grids: Int[np.ndarray, "rows height width"]
    skipped: dict[str, str]


def empty_part(grid: tuple[int, int], dtype: np.dtype) -> Part:
    """A part without tokens."""
    grids = np.zeros((PART_ROWS, *grid), dtype)
    return Part(np.zeros(PART_ROWS, np.uint64), np.zeros(PART_ROWS, np.uint8), grids, {})


def write_part(path: Path, part: Part) -> None:
    """Write a part in one step, with a digest of all of it."""
    tensors = {"names": part.names, "states": part.states, "grids": part.grids}
    about = {"skipped": part.skipped, "sha256": _digest(part)}
    replace_file(path, save(tensors, {"about": json.dumps(about)}))  # of two entries, the order would vary


def read_part(file: safe_open, path: Path) -> Part:
    """Read a whole part; TokenStoreError if it is not as it was written."""
    part = Part(*map(file.get_tensor, ("names", "states", "grids")), skipped_of(file))
    if _digest(part) != json.loads(file.metadata()["about"])["sha256"]:
        raise damaged(path, "it has changed since it was written")
    return part


def skipped_of(file: safe_open) -> dict[str, str]:
    """Images of a part that have no tokens, with the reason."""
    return json.loads(file.metadata()["about"])["skipped"]


@contextmanager
def opened(path: Path) -> Iterator[safe_open]:
    """A file of a store; TokenStoreError if it is truncated."""
    try:
        with safe_open(path, "numpy") as file:
            yield file
    except SafetensorError as error:
        raise damaged(path, str(error)) from None


def damaged(path: Path, how: str) -> TokenStoreError:
    """The error of a file of a store that cannot be used."""
    return TokenStoreError(f"token store file `{path}` is damaged ({how}): {RESTORE}")


def _digest(part: Part) -> str:
    sha = hashlib.sha256(json.dumps(part.skipped).encode())
    for tensor in (part.names, part.states, part.grids):
        sha.update(np.ascontiguousarray(tensor).data)
    return sha.hexdigest()
