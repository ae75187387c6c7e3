"""Blocks joined into files that readers read: what `TokenStore.seal` does."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mapet_mm.file_replacement import new_folder, replace_file
from mapet_mm.tokenizers.store.blocks import BlockIndex
from mapet_mm.tokenizers.store.errors import TokenStoreError
from mapet_mm.tokenizers.store.manifest import read_manifest, write_manifest
from mapet_mm.tokenizers.store.part_reader import RESTORE, PartReader
from mapet_mm.tokenizers.tensor_files import tensor_parts

# Rows joined at a time.
CHUNK_ROWS = 16384


def join_blocks(store: Path, readers: Sequence[PartReader], blocks: BlockIndex) -> None:
    """Make the store's next generation, with all grids of these parts in sealed files.

    Raises:
        FileExistsError: another process has made it.
        FileNotFoundError: another process has sealed a block and removed it.
    """
    manifest = read_manifest(store).following()
    parts = list(manifest.parts)
    with new_folder(store / manifest.folder) as folder:
        for number, reader in enumerate(readers):
            if reader.part.grids is None or reader.key in blocks.places:
                name = f"grids-{number}.safetensors"
                digest = _write_grids(folder / name, reader)
                parts[number] = reader.part.sealed(f"{manifest.folder}/{name}", digest, reader.skipped)
        write_manifest(folder, manifest.with_parts(parts))


def drop_joined(readers: Sequence[PartReader], blocks: BlockIndex) -> bool:
    """Remove blocks that sealed files hold, the oldest first, so that those left always count.

    Returns:
        False if a block, or a part, is in no sealed file yet.
    """
    by_key = {reader.key: reader for reader in readers}
    for block, path in enumerate(blocks.paths):
        part, rows, grids, skipped = blocks.counting(block)
        if not by_key[part].holds(rows, grids, skipped):
            return False
        path.unlink(missing_ok=True)
    return all(reader.part.grids is not None for reader in readers)


def check_checksums(store: Path, readers: Sequence[PartReader]) -> None:
    """Raise TokenStoreError unless all sealed files are what they were when they were written."""
    for part in (reader.part for reader in readers):
        for name, expected in ((part.names, part.names_sha256), (part.grids, part.grids_sha256)):
            if _sha256(store / name) != expected:
                raise TokenStoreError(
                    f"token store file `{store / name}` has changed since it was written (its checksum "
                    f"differs): {RESTORE}"
                )


def _write_grids(path: Path, reader: PartReader) -> str:
    """Write all grids of a part, zeros where an image was skipped; the file's checksum."""
    there, sha = reader.there(), hashlib.sha256()

    def chunks() -> Iterator[np.ndarray]:
        for first in range(0, len(there), CHUNK_ROWS):
            marks = there[first : first + CHUNK_ROWS]
            chunk = np.zeros((len(marks), *reader.grid), reader.dtype)
            chunk[marks] = reader.gather(first + np.flatnonzero(marks))
            yield chunk

    def hashed() -> Iterator[bytes]:
        shape = (len(there), *reader.grid)
        for content in tensor_parts("grids", np.dtype(reader.dtype), shape, chunks()):
            sha.update(content)
            yield content

    replace_file(path, hashed())
    return sha.hexdigest()


def _sha256(path: Path) -> str:
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            sha.update(chunk)
    return sha.hexdigest()
