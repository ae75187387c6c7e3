"""Reading one part of a token store: its names, its sealed grids, and the blocks above them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int

from mapet_mm.file_replacement import wait_until_seen
from mapet_mm.tokenizers.store.blocks import BlockIndex
from mapet_mm.tokenizers.store.errors import TokenStoreError
from mapet_mm.tokenizers.store.manifest import Manifest, Part
from mapet_mm.tokenizers.store.names import StoredNames
from mapet_mm.tokenizers.tensor_files import TensorFile

RESTORE = "restore it from a copy, or extract into another token store with tools/extract_tokens.py"


class PartReader:
    """Names and grids of one part; rows are counted from the part's first.

    Args:
        store: the store's folder.
        manifest: the store's.
        part: the part.
        blocks: the store's.
    """

    def __init__(self, store: Path, manifest: Manifest, part: Part, blocks: BlockIndex) -> None:
        self.store, self.part, self.blocks = store, part, blocks
        self.grid, self.dtype = manifest.grid, manifest.dtype
        self.key = part.names_sha256

    @cached_property
    def names(self) -> StoredNames:
        """The names, by row."""
        return StoredNames(self._open(self.part.names))

    @cached_property
    def _sealed(self) -> TensorFile | None:
        return None if self.part.grids is None else self._open(self.part.grids)

    def _open(self, name: str) -> TensorFile:
        wait_until_seen((self.store / name).parent)
        try:
            return TensorFile(self.store / name, TokenStoreError, RESTORE)
        except FileNotFoundError:
            raise TokenStoreError(f"`{self.store / name}` does not exist: {RESTORE}") from None

    def check(self) -> None:
        """Raise TokenStoreError if a file is missing or damaged."""
        self._open(self.part.names).close()
        if self.part.grids is not None:
            self._open(self.part.grids).close()

    @property
    def skipped(self) -> Mapping[int, str]:
        """Rows of images that could not be decoded, with the reason."""
        above, places = self.blocks.skipped(self.key), self.blocks.places.get(self.key)
        below = self.part.skipped
        if places is not None and below:
            below = {row: reason for row, reason in below.items() if places[row] < 0}
        return {**below, **above}

    def there(self) -> Bool[np.ndarray, " rows"]:
        """True where a row's tokens are stored."""
        there = np.full(self.part.rows, self._sealed is not None)
        there[list(self.part.skipped)] = False
        if (places := self.blocks.places.get(self.key)) is not None:
            there |= places >= 0
        there[list(self.blocks.skipped(self.key))] = False
        return there

    @cached_property
    def _read_sealed(self) -> Callable[[int], np.ndarray]:
        return (lambda row: None) if self._sealed is None else self._sealed.row_reader("grids")

    def read(self, row: int) -> Int[np.ndarray, "height width"] | None:
        """A row's grid, None if it is not stored.

        Raises:
            FileNotFoundError: its block is gone, sealed by another process.
        """
        places = self.blocks.places.get(self.key)
        if places is not None:
            if places[row] >= 0:
                return self.blocks.grid(int(places[row]))
            if row in self.blocks.skipped(self.key):
                return None
        return None if row in self.part.skipped else self._read_sealed(row)

    def gather(self, rows: Int[np.ndarray, " rows"]) -> Int[np.ndarray, "rows height width"]:
        """Grids of stored rows, ascending.

        Raises:
            FileNotFoundError: a block is gone, sealed by another process.
        """
        grids = np.zeros((len(rows), *self.grid), self.dtype)
        if self._sealed is not None and rows.size:
            grids[:] = self.sealed_grids(rows)
        if (places := self.blocks.places.get(self.key)) is not None:
            above = np.flatnonzero(places[rows] >= 0)
            for which, found in self.blocks.grids(places[rows[above]]):
                grids[above[which]] = found
        return grids

    def sealed_grids(self, rows: Int[np.ndarray, " rows"]) -> Int[np.ndarray, "rows height width"]:
        """Grids of ascending rows as they are in the sealed file."""
        first = int(rows[0])
        return self._sealed.rows("grids", first, int(rows[-1]) + 1)[rows - first]

    def holds(self, rows: np.ndarray, grids: np.ndarray, skipped: Mapping[str, str]) -> bool:
        """Whether the sealed file has these grids, and its part these rows as skipped."""
        if self._sealed is None or not all(int(row) in self.part.skipped for row in skipped):
            return False
        return all(
            np.array_equal(self._read_sealed(row), grid) for row, grid in zip(rows, grids, strict=True)
        )
