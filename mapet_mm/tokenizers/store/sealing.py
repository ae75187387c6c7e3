"""Blocks joined into files that readers read: what `TokenStore.seal` does."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int

from mapet_mm.tokenizers.store.errors import RESTORE, TokenStoreError
from mapet_mm.tokenizers.store.grids import Grids, spans
from mapet_mm.tokenizers.store.manifest import Manifest, write_generation
from mapet_mm.tokenizers.tensor_files import tensor_parts


def join_blocks(store: Path, manifest: Manifest, grids: Grids) -> None:
    """Make a generation with the grids that only blocks have; where there are none, remove the blocks.

    Raises:
        FileExistsError: another process has made it.
        FileNotFoundError: another process has sealed a block and removed it.
    """
    if grids.count != manifest.names.rows:  # extended this very moment
        return
    changed = grids.changed()
    if not changed.size and manifest.sealed_rows == grids.count:
        grids.drop_blocks()
        return
    # Files of grids stay as they are, unless a row of theirs is another now.
    kept = manifest.grids if changed.min(initial=grids.count) >= manifest.sealed_rows else ()
    first = sum(file.rows for file in kept)
    rows, skipped = grids.count - first, dict(sorted(grids.skipped.items()))
    content = tensor_parts("grids", np.dtype(manifest.dtype), (rows, *manifest.grid), _dense(grids, first))
    changes = lambda file: {"grids": (*kept, file), "skipped": skipped}  # noqa: E731
    write_generation(store, manifest, "grids.safetensors", content, rows, changes)


def check_files(store: Path, manifest: Manifest) -> None:
    """Raise TokenStoreError unless the files that count are what they were when they were written."""
    for path, expected, _ in (manifest.names, *manifest.grids):
        sha = hashlib.sha256()
        with open(store / path, "rb") as file:
            while chunk := file.read(2**20):
                sha.update(chunk)
        if sha.hexdigest() != expected:
            raise TokenStoreError(
                f"token store file `{store / path}` has changed since it was written (its checksum "
                f"differs): {RESTORE}"
            )


def _dense(grids: Grids, first: int) -> Iterator[Int[np.ndarray, "rows height width"]]:
    """All grids from a row on, some at a time, zeros where an image was skipped."""
    there = grids.there()
    for rows in spans(first, grids.count):
        chunk = np.zeros((len(rows), *grids.manifest.grid), grids.manifest.dtype)
        chunk[there[rows]] = grids.gather(rows[there[rows]])
        yield chunk
