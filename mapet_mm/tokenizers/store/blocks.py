"""Blocks: the rows of one `write`, a file each, that count from the moment they have their name.

A block holds what it needs to be understood alone: which part of the store it is of, rows, names, grids and
their checksum. Where blocks overlap, the later one counts; all of them come before a part's sealed grids.
"""

from __future__ import annotations

import errno
import hashlib
import json
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from jaxtyping import Int
from safetensors.numpy import save

from mapet_mm.file_replacement import replace_file
from mapet_mm.tokenizers.store.errors import TokenStoreError
from mapet_mm.tokenizers.store.manifest import Part
from mapet_mm.tokenizers.tensor_files import TensorFile

REMEDY = "remove it and run tools/extract_tokens.py again"
# Files open at a time.
HANDLES = 512


def write_block(
    folder: Path,
    part: Part,
    rows: Int[np.ndarray, " rows"],
    names: Sequence[str],
    grids: Int[np.ndarray, "rows height width"],
    skipped: Mapping[int, str],
) -> None:
    """Write a block; it is on disk when this returns.

    Args:
        folder: of the blocks.
        part: the part that the rows are of.
        rows: counted from the part's first.
        names: of the rows.
        grids: of the rows, of the store's type.
        skipped: images without tokens, by row, with the reason.
    """
    tensors = {
        "rows": rows.astype(np.uint32),
        "names": np.frombuffer("\n".join(names).encode("utf-8", "surrogateescape"), dtype=np.uint8),
        "grids": grids,
    }
    metadata = {
        "part": part.names_sha256,
        "sha256": hashlib.sha256(grids.tobytes()).hexdigest(),
        "skipped": json.dumps({str(row): reason for row, reason in skipped.items()}),
    }
    folder.mkdir(exist_ok=True)
    latest = max((int(path.name.split("-")[0]) for path in _files(folder)), default=0)
    # The number orders blocks, the rest keeps processes that write at the same moment apart.
    replace_file(folder / f"{latest + 1:08d}-{uuid.uuid4().hex[:12]}.safetensors", save(tensors, metadata))


class BlockIndex:
    """Where in a store's blocks each row is, as far as they were there at the last `refresh`.

    Args:
        folder: of the blocks; need not exist.
        parts: the store's; blocks of others are of an extension that this index does not know.
    """

    def __init__(self, folder: Path, parts: Sequence[Part]) -> None:
        self.folder, self._parts = folder, {part.names_sha256: part.rows for part in parts}
        self._forget()

    def _forget(self) -> None:
        self.scanned = False
        self.paths: list[Path] = []
        self._others: set[Path] = set()
        # Places are counted through the rows of all blocks; a block's begin here.
        self._starts = [0]
        self._readers: dict[int, Callable[[int], np.ndarray]] = {}
        # By part, the place of each of its rows, -1 where no block has it; no entry if none has any.
        self.places: dict[str, Int[np.ndarray, " rows"]] = {}
        self._skipped: dict[str, dict[int, str]] = {part: {} for part in self._parts}

    def refresh(self) -> bool:
        """Take up new blocks; False, and none is known, if one is gone: sealed by another process."""
        found = set(_files(self.folder))
        known = {*self.paths, *self._others}
        try:
            if known <= found:
                for path in sorted(found - known):
                    self._add(path)
                self.scanned = True
                return True
        except FileNotFoundError:
            pass
        self._forget()
        return False

    def _add(self, path: Path) -> None:
        with _removed_is_not_found():
            file = TensorFile(path, TokenStoreError, REMEDY)
            part, rows = file.metadata["part"], file.rows("rows").astype(np.int64)
        skipped = {int(row): reason for row, reason in json.loads(file.metadata["skipped"]).items()}
        file.close()
        if part not in self._parts:
            self._others.add(path)
            return
        self.paths.append(path)
        if part not in self.places:
            self.places[part] = np.full(self._parts[part], -1, dtype=np.int32)
        places = self.places[part]
        places[rows] = np.arange(self._starts[-1], self._starts[-1] + len(rows))
        places[list(skipped)] = -1
        for row in rows.tolist() if self._skipped[part] else ():
            self._skipped[part].pop(row, None)
        self._skipped[part].update(skipped)
        self._starts.append(self._starts[-1] + len(rows))

    def skipped(self, part: str) -> Mapping[int, str]:
        """Rows of a part that blocks say were skipped, with the reason."""
        return self._skipped[part]

    def grid(self, place: int) -> Int[np.ndarray, "height width"]:
        """The grid at a place.

        Raises:
            FileNotFoundError: the block is gone.
        """
        block = bisect_right(self._starts, place) - 1
        reader = self._readers.get(block) or self._reader(block)
        try:
            return reader(place - self._starts[block])
        except OSError:
            with _removed_is_not_found():
                raise

    def grids(self, places: Int[np.ndarray, " rows"]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For each block that has some of these places: which of them, and their grids, checked.

        Raises:
            FileNotFoundError: a block is gone.
            TokenStoreError: a block's checksum does not fit.
        """
        blocks = np.searchsorted(self._starts, places, side="right") - 1
        for block in np.unique(blocks).tolist():
            which, file = np.flatnonzero(blocks == block), self._file(block)
            with _removed_is_not_found():
                grids = file.rows("grids")
            if hashlib.sha256(grids.tobytes()).hexdigest() != file.metadata["sha256"]:
                raise TokenStoreError(
                    f"`{self.paths[block]}` has changed since it was written (its checksum differs): {REMEDY}"
                )
            yield which, grids[places[which] - self._starts[block]]

    def counting(self, block: int) -> tuple[str, np.ndarray, np.ndarray, dict[int, str]]:
        """What of a block still counts: its part, rows and their grids; and the rows that it skipped.

        Raises:
            FileNotFoundError: the block is gone.
        """
        file = self._file(block)
        with _removed_is_not_found():
            part, rows, grids = file.metadata["part"], file.rows("rows").astype(np.int64), file.rows("grids")
        counts = self.places[part][rows] == np.arange(self._starts[block], self._starts[block + 1])
        return part, rows[counts], grids[counts], json.loads(file.metadata["skipped"])

    def _file(self, block: int) -> TensorFile:
        with _removed_is_not_found():
            return TensorFile(self.paths[block], TokenStoreError, REMEDY)

    def _reader(self, block: int) -> Callable[[int], np.ndarray]:
        while len(self._readers) >= HANDLES:
            self._readers.pop(next(iter(self._readers)))
        self._readers[block] = self._file(block).row_reader("grids")
        return self._readers[block]


@contextmanager
def _removed_is_not_found() -> Iterator[None]:
    """Over NFS, an open file that another machine has removed is stale."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ESTALE:
            raise FileNotFoundError(*error.args) from None
        raise


def _files(folder: Path) -> list[Path]:
    return list(folder.glob("[0-9]*.safetensors"))
