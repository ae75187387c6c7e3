"""Join blocks into one file, for `TokenStore.seal`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int

from mapet_mm.structures.store.errors import RESTORE, TokenStoreError
from mapet_mm.structures.store.grids import Grids, spans
from mapet_mm.structures.store.manifest import Manifest, write_generation
from mapet_mm.structures.tensor_files import tensor_parts
from mapet_mm.utils.identity import digest_of_file


def join_blocks(store: Path, manifest: Manifest, grids: Grids) -> None:
    """Make a generation with the grids that are only in blocks; if there are none, remove the blocks.

    Raises:
        FileExistsError: another process has made the generation.
        FileNotFoundError: another process has sealed a block and removed it.
    """
    if grids.count != manifest.names.rows:  # extended just now
        return
    changed = grids.changed()
    if not changed.size and manifest.sealed_rows == grids.count:
        grids.drop_blocks()
        return
    # Existing files of grids are kept unless one of their rows has changed.
    kept = manifest.grids if changed.min(initial=grids.count) >= manifest.sealed_rows else ()
    first = sum(file.rows for file in kept)
    rows, skipped = grids.count - first, dict(sorted(grids.skipped.items()))
    content = tensor_parts("grids", np.dtype(manifest.dtype), (rows, *manifest.grid), _dense(grids, first))
    changes = lambda file: {"grids": (*kept, file), "skipped": skipped}  # noqa: E731
    write_generation(store, manifest, "grids.safetensors", content, rows, changes)


def check_files(store: Path, manifest: Manifest) -> None:
    """Raise TokenStoreError if a file of the manifest is not as it was written."""
    for path, expected, _ in (manifest.names, *manifest.grids):
        if digest_of_file(store / path) != expected:
            raise TokenStoreError(
                f"token store file `{store / path}` has changed since it was written (its checksum "
                f"differs): {RESTORE}"
            )


def _dense(grids: Grids, first: int) -> Iterator[Int[np.ndarray, "rows height width"]]:
    """All grids starting at a row, in chunks, with zeros for skipped images."""
    there = grids.there()
    for rows in spans(first, grids.count):
        chunk = np.zeros((len(rows), *grids.manifest.grid), grids.manifest.dtype)
        chunk[there[rows]] = grids.gather(rows[there[rows]])
        yield chunk
