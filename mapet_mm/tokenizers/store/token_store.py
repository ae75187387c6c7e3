"""The token store: one grid of token ids per image, looked up by the image's name."""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from mapet_mm.file_replacement import new_folder
from mapet_mm.tokenizers.store.blocks import BlockIndex, write_block
from mapet_mm.tokenizers.store.errors import REMEDY, MissingTokensError, TokenStoreError
from mapet_mm.tokenizers.store.manifest import (
    Manifest,
    newest_generation,
    read_manifest,
    write_manifest,
    write_names,
)
from mapet_mm.tokenizers.store.part_reader import PartReader
from mapet_mm.tokenizers.store.sealing import CHUNK_ROWS, check_checksums, drop_joined, join_blocks

BLOCKS = "blocks"
IDENTITY = ("grid", "vocab_size", "tokenizer", "preprocessing", "data_root")


class TokenStore:
    """A folder with a grid of token ids for each named image; made by `create`, read through `open`.

    Every file in it is written once, by one process, and appears whole: `write` leaves a block in `blocks/`
    that counts at once; `seal` joins the blocks into one file that readers read; `extend_store` adds images.
    Sealing and extending make a new generation, whose manifest says which files count; who has the store open
    goes on with the generation that he opened. So any number of processes and machines may write, read and
    die at any time. All files but the manifests are safetensors.

    Opening reads no names; files are opened when first used, so a store can be pickled and used after a fork.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self._use(read_manifest(self.path))
        for part in self._parts:
            part.check()

    @classmethod
    def open(cls, path: str | os.PathLike) -> TokenStore:
        """Open an existing token store.

        Raises:
            TokenStoreError: it is missing, not a token store, or one of its files is damaged.
        """
        return cls(path)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike,
        names: Iterable[str],
        grid: Sequence[int],
        vocab_size: int,
        tokenizer: str,
        data_root: str | None = None,
        preprocessing: Mapping[str, Any] | None = None,
    ) -> TokenStore:
        """Make a store with no row written; it appears at `path` complete or not at all.

        Args:
            path: directory to make.
            names: image paths relative to the data root, '/'-separated, each once; row i is name i.
            grid: (H, W) tokens of an image.
            vocab_size: ids are below it; stored as uint16 up to 65,536 ids, else as uint32.
            tokenizer: digest of the codebook (or other tokenizer) whose ids these are.
            data_root: folder that the names are relative to, recorded for look-ups.
            preprocessing: what the tokenizer was shown: `pipeline` and `data_preprocessor`, as in configs.

        Raises:
            TokenStoreError: something is at `path` already, or the names cannot be stored.
        """
        path, names = Path(path), list(names)
        height, width = (int(side) for side in grid)
        manifest = Manifest(
            (height, width),
            int(vocab_size),
            tokenizer,
            None if data_root is None else str(data_root),
            None if preprocessing is None else dict(preprocessing),
            parts=(),
        )
        try:
            with new_folder(path) as folder:
                add_names(folder, manifest, names)
        except FileExistsError:
            _refuse_existing(path, manifest, names)
        return cls(path)

    @property
    def grid(self) -> tuple[int, int]:
        """(H, W) tokens of an image."""
        return self._manifest.grid

    @property
    def vocab_size(self) -> int:
        """All ids are below this."""
        return self._manifest.vocab_size

    @property
    def tokenizer(self) -> str:
        """Digest of the tokenizer that made the ids."""
        return self._manifest.tokenizer

    @property
    def data_root(self) -> str | None:
        """Folder that the names are relative to, as given when the store was made."""
        return self._manifest.data_root

    @property
    def preprocessing(self) -> Mapping[str, Any] | None:
        """What the tokenizer was shown (`pipeline`, `data_preprocessor`), if it was recorded."""
        return self._manifest.preprocessing

    @property
    def names(self) -> Sequence[str]:
        """The image names, by row; a sequence that reads them from disk as it goes."""
        return self._parts[0].names if len(self._parts) == 1 else _Chained([p.names for p in self._parts])

    @property
    def skipped(self) -> dict[str, str]:
        """Images that could not be decoded and have no tokens, by name, with the reason."""
        self._refresh()
        return {part.names[row]: reason for part in self._parts for row, reason in part.skipped.items()}

    def __len__(self) -> int:
        return self._starts[-1]

    def __contains__(self, name: str) -> bool:
        return self.row(name) is not None

    def row(self, name: str) -> int | None:
        """Row of an image name, or None if the store does not know it."""
        for part, start in zip(self._parts, self._starts, strict=False):
            if (row := part.names.find(name)) is not None:
                return start + row
        return None

    def require_tokenizer(self, digest: str, whose: str) -> None:
        """Refuse ids of another tokenizer.

        Args:
            digest: the tokenizer's that is wanted.
            whose: what that is, for the message ("the config's codebook `...`").

        Raises:
            TokenStoreError: the store was made by another one.
        """
        if self.tokenizer != digest:
            raise TokenStoreError(
                f"token store `{self.path}` was made by tokenizer {self.tokenizer[:12]}, but {whose} is "
                f"{digest[:12]}: re-extract into another store with tools/extract_tokens.py, or use the other"
            )

    def __getitem__(self, name: str) -> Int[np.ndarray, "height width"]:
        """Token grid (H, W) of an image, a copy, as uint16 (uint32 past 65,536 ids).

        Raises:
            MissingTokensError: the store does not know the name, its tokens are not written yet, or the image
                was skipped.
        """
        for number, part in enumerate(self._parts):
            row = part.names.find(name)
            if row is not None:
                try:
                    grid = part.read(row) if self._blocks.scanned else None
                except FileNotFoundError:  # its block was sealed by another process
                    grid = None
                return self._look_again(name, number, row) if grid is None else grid
        raise MissingTokensError(f"token store `{self.path}` has no image `{name}`: {REMEDY} on it")

    def _look_again(self, name: str, number: int, row: int) -> Int[np.ndarray, "height width"]:
        """A grid of a part's row that may have been written, or sealed, since the blocks were looked at."""
        while True:
            self._refresh()
            try:
                grid = self._parts[number].read(row)
            except FileNotFoundError:  # sealed this very moment
                continue
            if grid is not None:
                return grid
            if reason := self._parts[number].skipped.get(row):
                raise MissingTokensError(
                    f"token store `{self.path}` has no tokens for image `{name}`, which was skipped "
                    f"({reason}): leave it out, or repair it and run tools/extract_tokens.py --retry-skipped"
                )
            raise MissingTokensError(
                f"token store `{self.path}` has no tokens for image `{name}` yet: {REMEDY} to complete it"
            )

    def chunks(self) -> Iterator[tuple[Int[np.ndarray, " rows"], Int[np.ndarray, "rows height width"]]]:
        """Rows whose tokens are stored, ascending, with their grids, thousands at a time."""
        self._refresh()
        for number, start in enumerate(self._starts[:-1]):
            there = self._parts[number].there()
            for first in range(0, len(there), CHUNK_ROWS):
                rows = first + np.flatnonzero(there[first : first + CHUNK_ROWS])
                if rows.size:
                    yield start + rows, self._gather(number, rows)

    def written(self) -> np.ndarray:
        """Boolean mark of every row: True where its tokens are stored."""
        self._refresh()
        return np.concatenate([part.there() for part in self._parts])

    def missing(self, with_skipped: bool = False) -> np.ndarray:
        """Rows (int64, ascending) whose tokens are not written yet.

        Args:
            with_skipped: whether images that were skipped count as missing.
        """
        missing = ~self.written()
        if not with_skipped:
            for part, start in zip(self._parts, self._starts, strict=False):
                missing[[start + row for row in part.skipped]] = False
        return np.flatnonzero(missing)

    def write(
        self,
        rows: Sequence[int] | np.ndarray,
        grids: Int[np.ndarray, "rows height width"],
        skipped: Mapping[int, str] | None = None,
    ) -> None:
        """Store token grids; they are on disk when this returns, and a killed run leaves them missing.

        Any number of processes may write to one store at a time.

        Args:
            rows: row of each grid, no row twice.
            grids: (len(rows), H, W) ids (array or CPU tensor).
            skipped: rows of images that cannot be decoded, with the reason.

        Raises:
            TokenStoreError: wrong shape, ids outside 0..vocab_size - 1, or rows outside the store.
        """
        rows, grids, skipped = np.asarray(rows, dtype=np.int64), np.asarray(grids), dict(skipped or {})
        self._check_written(rows, grids, skipped)
        for part, start, stop in zip(self._parts, self._starts, self._starts[1:], strict=False):
            mine = (start <= rows) & (rows < stop)
            here, names = rows[mine] - start, [part.names[row] for row in (rows[mine] - start).tolist()]
            passed = {row - start: reason for row, reason in skipped.items() if start <= row < stop}
            if names or passed:
                content = grids[mine].astype(self._manifest.dtype)
                write_block(self.path / BLOCKS, part.part, here, names, content, passed)

    @property
    def sealed(self) -> bool:
        """Whether all tokens are in files with checksums, and none in blocks."""
        self._refresh()
        return all(part.part.grids is not None for part in self._parts) and not self._blocks.paths

    def seal(self) -> None:
        """Join the blocks into files that readers read, with checksums; call it once all rows are written.

        Raises:
            TokenStoreError: rows are missing.
        """
        while not self.sealed:
            if missing := self.missing().size:
                raise TokenStoreError(
                    f"token store `{self.path}` misses the tokens of {missing} images: "
                    f"{REMEDY} to complete it"
                )
            # Where another process that seals is ahead: look again at what is left to do.
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                if not drop_joined(self._parts, self._blocks):
                    join_blocks(self.path, self._parts, self._blocks)

    def verify_checksums(self) -> None:
        """Read all files and compare them with the checksums that sealing recorded.

        Raises:
            TokenStoreError: a file has changed since, or the store is not sealed.
        """
        if not self.sealed:
            raise TokenStoreError(f"token store `{self.path}` has no checksums yet: {REMEDY} to complete it")
        check_checksums(self.path, self._parts)

    def _check_written(self, rows: np.ndarray, grids: np.ndarray, skipped: Mapping[int, str]) -> None:
        if grids.shape != (*rows.shape, *self.grid) or rows.ndim != 1:
            raise TokenStoreError(
                f"token store `{self.path}` takes grids of shape {(*rows.shape, *self.grid)} "
                f"for {rows.size} rows, got {grids.shape}"
            )
        if not np.issubdtype(grids.dtype, np.integer):
            raise TokenStoreError(f"token store `{self.path}` takes integer ids, got {grids.dtype}")
        if grids.size and not (grids.min() >= 0 and grids.max() < self.vocab_size):
            raise TokenStoreError(
                f"token store `{self.path}` takes ids from 0 to {self.vocab_size - 1} (its vocab_size), "
                f"got {grids.min()} to {grids.max()}: it was made for another tokenizer"
            )
        every = np.append(rows, np.fromiter(skipped, dtype=np.int64))
        if every.size and not (every.min() >= 0 and every.max() < len(self)):
            raise TokenStoreError(
                f"token store `{self.path}` has rows 0 to {len(self) - 1}, got {every.min()} to {every.max()}"
            )
        if len(np.unique(every)) != len(every):
            raise TokenStoreError(f"token store `{self.path}` takes each row once, got one twice")

    def _gather(self, number: int, rows: np.ndarray) -> np.ndarray:
        """Grids of stored rows, though another process may seal their blocks meanwhile."""
        while True:
            with contextlib.suppress(FileNotFoundError):
                return self._parts[number].gather(rows)
            self._refresh()

    def _use(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._blocks = BlockIndex(self.path / BLOCKS, manifest.parts)
        self._parts = [PartReader(self.path, manifest, part, self._blocks) for part in manifest.parts]
        self._starts = [0, *accumulate(part.rows for part in manifest.parts)]

    def _refresh(self) -> None:
        """Take up what was written since; of newer generations only that what is known here was sealed."""
        while newest_generation(self.path) > self._manifest.generation or not self._blocks.refresh():
            self._reload()

    def _reload(self) -> None:
        newest = read_manifest(self.path)
        self._use(newest.with_parts(newest.parts[: len(self._parts)]))

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "manifest": self._manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        self._use(state["manifest"])

    def __repr__(self) -> str:
        return (
            f"TokenStore({str(self.path)!r}, {len(self)} images, grid {self.grid}, "
            f"vocab_size {self.vocab_size}, tokenizer {self.tokenizer[:12]})"
        )


def add_names(store: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Make a generation of a store that has a part more, of these names.

    Raises:
        TokenStoreError: the names cannot be rows.
        FileExistsError: another process has made the generation meanwhile.
    """
    with new_folder(store / manifest.folder) as folder:
        try:
            part = write_names(folder, manifest.folder, names)
        except ValueError as error:
            raise TokenStoreError(f"token store `{store}`: {error}") from None
        write_manifest(folder, manifest.with_parts([*manifest.parts, part]))


class _Chained(Sequence):
    """Sequences one behind the other."""

    def __init__(self, sequences: Sequence[Sequence[str]]) -> None:
        self._sequences = sequences
        self._starts = [0, *accumulate(map(len, sequences))]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> str:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} rows")
        index %= len(self)
        which = bisect_right(self._starts, index) - 1
        return self._sequences[which][index - self._starts[which]]

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self._sequences)


def _refuse_existing(path: Path, manifest: Manifest, names: Sequence[str]) -> None:
    if not any(path.glob("generation-*")):
        raise TokenStoreError(f"`{path}` exists and is not a token store: choose another path or remove it")
    store = TokenStore.open(path)
    other = [key for key in IDENTITY if getattr(store._manifest, key) != getattr(manifest, key)]
    if list(store.names) != list(names):
        other.append("names")
    if other:
        raise TokenStoreError(
            f"token store `{path}` exists with other {', '.join(other)}: choose another path or remove it"
        )
    raise TokenStoreError(
        f"token store `{path}` exists with the same names, grid and tokenizer: "
        "continue it with TokenStore.open (tools/extract_tokens.py does)"
    )
