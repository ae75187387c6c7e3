"""The grids of a store's rows, in sealed files and in newer blocks.

A block holds the rows of one `write`, in a file that counts as soon as it has its final name. It is
self-contained: rows, names, grids, the skipped images and checksums. If blocks overlap, the later one counts.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int
from safetensors.numpy import save

from mapet_mm.structures.store.errors import RESTORE, TokenStoreError
from mapet_mm.structures.store.manifest import Manifest
from mapet_mm.structures.tensor_files import TensorFile, encode_name, text_tensor
from mapet_mm.utils.atomic_files import replace_file, wait_until_seen

BLOCKS = "blocks"
REMOVE = "remove it and run tools/extract_tokens.py again"
# Maximum number of open files.
HANDLES = 512
# Rows read at once.
CHUNK_ROWS = 16384


def write_block(
    store: Path,
    manifest: Manifest,
    rows: Int[np.ndarray, " rows"],
    names: Sequence[str],
    grids: Int[np.ndarray, "rows height width"],
    skipped: Mapping[int, str],
) -> None:
    """Write a block; it is on disk when this returns.

    Args:
        store: the store's folder.
        manifest: of the store.
        rows: row of each grid.
        names: name of each row.
        grids: the ids.
        skipped: images without tokens, by row, with the reason.
    """
    grids = grids.astype(manifest.dtype)
    tensors = {
        "rows": rows.astype(np.uint32),
        "names": text_tensor(map(encode_name, names)),
        "grids": grids,
    }
    reasons = json.dumps(dict(skipped))
    metadata = {
        "store": _identity(manifest),
        "sha256": _digest(grids),
        "rows_sha256": _digest(tensors["rows"], tensors["names"], reasons.encode()),
        "skipped": reasons,
    }
    (store / BLOCKS).mkdir(exist_ok=True)
    latest = max((int(path.name.split("-")[0]) for path in _blocks(store)), default=0)
    # The number orders the blocks; the rest keeps simultaneous writers from choosing the same name.
    name = f"{latest + 1:08d}-{uuid.uuid4().hex[:12]}.safetensors"
    replace_file(store / BLOCKS / name, save(tensors, metadata))


def open_listed(path: Path) -> TensorFile:
    """Open a file that the manifest lists, which must exist."""
    wait_until_seen(path.parent)
    try:
        return TensorFile(path, TokenStoreError, RESTORE)
    except FileNotFoundError:
        raise TokenStoreError(f"`{path}` does not exist: {RESTORE}") from None


class Grids:
    """The grids of a store's rows, as of the last `refresh`.

    A place is a row's number counted across all files: the sealed ones, then the blocks.

    Args:
        store: the store's folder.
        manifest: of the store.
        count: number of rows; a later extension may have more.
    """

    def __init__(self, store: Path, manifest: Manifest, count: int) -> None:
        self.store, self.manifest, self.count = store, manifest, count
        self._forget()

    def _forget(self) -> None:
        self.looked = False
        self._files = [self.store / file.path for file in self.manifest.grids]
        self._starts = [0]
        for file in self.manifest.grids:
            self._starts.append(self._starts[-1] + file.rows)
        self._readers: dict[int, Callable[[int], np.ndarray]] = {}
        self._checked: set[int] = set()  # numbers of blocks whose grids are as they were written
        self._foreign: set[Path] = set()
        # Blocks with rows of an extension that this generation does not know.
        self._beyond: set[Path] = set()
        # Place of each row, -1 if it has none; None while there are no blocks and place equals row.
        self._places: Int[np.ndarray, " rows"] | None = None
        self.skipped = {row: why for row, why in self.manifest.skipped.items() if row < self.count}

    @property
    def blocks(self) -> list[Path]:
        """The blocks, the oldest first."""
        return self._files[len(self.manifest.grids) :]

    def refresh(self) -> bool:
        """Add new blocks; False, with all forgotten, if a block is gone because another process sealed it."""
        found, known = set(_blocks(self.store)), {*self.blocks, *self._foreign}
        try:
            if known <= found:
                for path in sorted(found - known):
                    self._add(path)
                self.looked = True
                return True
        except FileNotFoundError:
            pass
        self._forget()
        return False

    def _add(self, path: Path) -> None:
        file = TensorFile(path, TokenStoreError, REMOVE)
        rows, names, metadata = file.rows("rows"), file.rows("names"), file.metadata
        file.close()
        if metadata["store"] != _identity(self.manifest):
            self._foreign.add(path)
            return
        if "rows_sha256" in metadata:  # older blocks have none
            _require(path, metadata["rows_sha256"], rows, names, metadata["skipped"].encode())
        rows = rows.astype(np.int64)
        if self._places is None:
            self._places = np.arange(self.count, dtype=np.int32)
            self._places[self._starts[-1] :] = -1
        start = self._starts[-1]
        self._files.append(path)
        self._starts.append(start + len(rows))
        skipped = {int(row): reason for row, reason in json.loads(metadata["skipped"]).items()}
        if max(rows.max(initial=0), *skipped, 0) >= self.count:
            self._beyond.add(path)
        mine = rows < self.count
        self._places[rows[mine]] = np.arange(start, start + len(rows))[mine]
        for row in rows.tolist() if self.skipped else ():
            self.skipped.pop(row, None)
        skipped = {row: reason for row, reason in skipped.items() if row < self.count}
        self._places[list(skipped)] = -1
        self.skipped |= skipped

    def there(self) -> Bool[np.ndarray, " rows"]:
        """True where a row's tokens are stored."""
        there = np.arange(self.count) < self._starts[-1] if self._places is None else self._places >= 0
        there[list(self.skipped)] = False
        return there

    def read(self, row: int) -> Int[np.ndarray, "height width"] | None:
        """A row's grid, None if it is not stored.

        Raises:
            FileNotFoundError: its block is gone, sealed by another process.
        """
        place = row if self._places is None else int(self._places[row])
        if not 0 <= place < self._starts[-1] or row in self.skipped:
            return None
        number = bisect_right(self._starts, place) - 1
        reader = self._readers.get(number) or self._reader(number)
        return reader(place - self._starts[number])

    def gather(self, rows: Int[np.ndarray, " rows"]) -> Int[np.ndarray, "rows height width"]:
        """Grids of stored rows; those of blocks are compared with their checksums.

        Raises:
            FileNotFoundError: a block is gone, sealed by another process.
            TokenStoreError: a block's checksum does not fit.
        """
        return self._at(rows if self._places is None else self._places[rows])

    def _at(self, places: Int[np.ndarray, " rows"]) -> Int[np.ndarray, "rows height width"]:
        grids = np.empty((len(places), *self.manifest.grid), self.manifest.dtype)
        numbers = np.searchsorted(self._starts, places, side="right") - 1
        for number in np.unique(numbers).tolist():
            which, file = np.flatnonzero(numbers == number), self._open(number)
            inside = places[which] - self._starts[number]
            sealed = number < len(self.manifest.grids)
            first, stop = (int(inside.min()), int(inside.max()) + 1) if sealed else (0, None)
            found = file.rows("grids", first, stop)
            if not sealed:
                _require(file.path, file.metadata["sha256"], found)
            grids[which] = found[inside - first]
        return grids

    def changed(self) -> Int[np.ndarray, " rows"]:
        """Rows that are in blocks, and in the sealed files either missing or different."""
        skips = {row for row, _ in self.skipped.items() ^ self.manifest.skipped.items()}
        if self._places is None:
            return np.array(sorted(skips), dtype=np.int64)
        sealed = self.manifest.sealed_rows
        above = np.flatnonzero(self._places >= sealed)
        again = above[above < sealed]
        for span in spans(0, len(again)):
            rows = again[span]
            same = (self._at(self._places[rows]) == self._at(rows)).all(axis=(1, 2))
            above = np.setdiff1d(above, rows[same], assume_unique=True)
        return np.union1d(above, list(skips)).astype(np.int64)

    def drop_blocks(self) -> None:
        """Remove the blocks, the oldest first, so that those left always count, once nothing is `changed`."""
        for path in self.blocks:
            if path not in self._beyond:
                path.unlink(missing_ok=True)

    def _open(self, number: int) -> TensorFile:
        if number < len(self.manifest.grids):
            return open_listed(self._files[number])
        return TensorFile(self._files[number], TokenStoreError, REMOVE)

    def _reader(self, number: int) -> Callable[[int], np.ndarray]:
        while len(self._readers) >= HANDLES:
            self._readers.pop(next(iter(self._readers)))
        file = self._open(number)
        if number >= len(self.manifest.grids) and number not in self._checked:
            _require(file.path, file.metadata["sha256"], file.rows("grids"))
            self._checked.add(number)
        self._readers[number] = file.row_reader("grids")
        return self._readers[number]


def spans(start: int, stop: int) -> Iterator[Int[np.ndarray, " rows"]]:
    """Row numbers in chunks of `CHUNK_ROWS`."""
    for first in range(start, stop, CHUNK_ROWS):
        yield np.arange(first, min(first + CHUNK_ROWS, stop))


def _blocks(store: Path) -> list[Path]:
    return list((store / BLOCKS).glob("[0-9]*.safetensors"))


def _identity(manifest: Manifest) -> str:
    return f"{manifest.origin} {manifest.tokenizer}"


def _digest(*parts: np.ndarray | bytes) -> str:
    sha = hashlib.sha256()
    for part in parts:
        sha.update(np.ascontiguousarray(part) if isinstance(part, np.ndarray) else part)
    return sha.hexdigest()


def _require(block: Path, expected: str, *parts: np.ndarray | bytes) -> None:
    if _digest(*parts) != expected:
        raise TokenStoreError(f"`{block}` has changed since it was written (its checksum differs): {REMOVE}")
