"""The token store: one grid of token ids per image, looked up by the image's name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool, Int

from mapet_mm.structures.store.errors import REMEDY, MissingTokensError, TokenStoreError
from mapet_mm.structures.store.grids import Grids, open_listed, spans, write_block
from mapet_mm.structures.store.manifest import Manifest, newest_generation, read_manifest, write_generation
from mapet_mm.structures.store.names import StoredNames, names_file
from mapet_mm.structures.store.sealing import check_files, join_blocks
from mapet_mm.utils.atomic_files import new_folder
from mapet_mm.utils.config import pair

IDENTITY = ("grid", "vocab_size", "tokenizer", "preprocessing", "data_root")
T = TypeVar("T")


class TokenStore:
    """A folder with a grid of token ids for each named image; made by `create`, read through `open`.

    Every file in it is written once, by one process, and appears whole. `write` puts a block into `blocks/`,
    which counts at once; `seal` joins the blocks into one file; `extend_store` adds images. Sealing and
    extending make a new generation, whose manifest says which files count; readers that have the store open
    keep the generation that they opened. So any number of processes and machines may write, read and die at
    any time. All files except the manifests are safetensors.

    Opening a store reads no names. Files are opened when first used, so a store can be pickled and used after
    a fork.

    Attributes:
        path: the folder.
        grid: (H, W) tokens of an image.
        vocab_size: all ids are below this.
        tokenizer: digest of the tokenizer that made the ids.
        data_root: folder that the names are relative to, as given when the store was made.
        preprocessing: how images were prepared for the tokenizer (`pipeline`, `data_preprocessor`), if
            recorded.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        manifest = read_manifest(Path(path))
        self.__setstate__({"path": Path(path), "names": manifest.names, "manifest": manifest})
        for file in (manifest.names, *manifest.grids):
            open_listed(self.path / file.path).close()

    def _use(self, manifest: Manifest) -> None:
        self._manifest, self._grids = manifest, Grids(self.path, manifest, len(self))
        self.grid, self.vocab_size, self.tokenizer = manifest.grid, manifest.vocab_size, manifest.tokenizer
        self.data_root, self.preprocessing = manifest.data_root, manifest.preprocessing

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
        grid: int | Sequence[int],
        vocab_size: int,
        tokenizer: str,
        data_root: str | None = None,
        preprocessing: Mapping[str, Any] | None = None,
    ) -> TokenStore:
        """Make a store with no rows written yet; it appears at `path` complete or not at all.

        Args:
            path: directory to make.
            names: image paths relative to the data root, '/'-separated, each once; row i is name i.
            grid: (H, W) tokens of an image, or one number for both.
            vocab_size: ids are below it; stored as uint16 up to 65,536 ids, else as uint32.
            tokenizer: digest of the codebook (or other tokenizer) whose ids these are.
            data_root: folder that the names are relative to, recorded for look-ups.
            preprocessing: how images were prepared for the tokenizer: `pipeline` and `data_preprocessor`, as
                in configs.

        Raises:
            TokenStoreError: something is at `path` already, or the names cannot be stored.
            ValueError: `grid` is not one or two whole numbers above 0.
        """
        path, names = Path(path), list(names)
        root = None if data_root is None else str(data_root)
        shown = None if preprocessing is None else dict(preprocessing)
        manifest = Manifest(pair("grid", grid), int(vocab_size), tokenizer, root, shown)
        try:
            with new_folder(path) as folder:
                write_names(folder, manifest, names, path)
        except FileExistsError:
            _refuse_existing(path, manifest, names)
        return cls(path)

    @cached_property
    def names(self) -> Sequence[str]:
        """The image names by row, in a sequence that reads them from disk when accessed."""
        return StoredNames(open_listed(self.path / self._names.path), len(self))

    @property
    def skipped(self) -> dict[str, str]:
        """Images that could not be decoded and have no tokens, by name, with the reason."""
        self._refresh()
        return {self.names[row]: reason for row, reason in sorted(self._grids.skipped.items())}

    def __len__(self) -> int:
        return self._names.rows

    def __contains__(self, name: str) -> bool:
        return self.row(name) is not None

    def row(self, name: str) -> int | None:
        """Row of an image name, or None if the store does not have it."""
        return self.names.find(name)

    def require_tokenizer(self, digest: str, whose: str) -> None:
        """Raise an error if another tokenizer made the ids.

        Args:
            digest: of the expected tokenizer.
            whose: what has this digest, for the message ("the config's codebook `...`").

        Raises:
            TokenStoreError: another tokenizer made the store.
        """
        if self.tokenizer != digest:
            raise TokenStoreError(
                f"token store `{self.path}` was made by tokenizer {self.tokenizer[:12]}, but {whose} is "
                f"{digest[:12]}: re-extract into another store with tools/extract_tokens.py, or use the other"
            )

    def __getitem__(self, name: str) -> Int[np.ndarray, "height width"]:
        """Token grid (H, W) of an image, a copy, as uint16 (uint32 past 65,536 ids).

        Raises:
            MissingTokensError: the store does not have the name, its tokens are not written yet, or the image
                was skipped.
        """
        row = self.names.find(name)
        if row is None:
            raise MissingTokensError(f"token store `{self.path}` has no image `{name}`: {REMEDY} on it")
        try:
            grid = self._grids.read(row) if self._grids.looked else None
        except FileNotFoundError:
            grid = None
        if grid is None:  # it may have been written since the last look
            self._refresh()
            grid = self._lasting(Grids.read, row)
        if grid is None:
            self._explain(name, self._grids.skipped.get(row))
        return grid

    def _explain(self, name: str, reason: str | None) -> None:
        if reason is None:
            raise MissingTokensError(
                f"token store `{self.path}` has no tokens for image `{name}` yet: {REMEDY} to complete it"
            )
        raise MissingTokensError(
            f"token store `{self.path}` has no tokens for image `{name}`, which was skipped "
            f"({reason}): leave it out, or repair it and run tools/extract_tokens.py --retry-skipped"
        )

    def _lasting(self, read: Callable[[Grids, Any], T], what: Any) -> T:
        """Call `read` on the grids, again if another process sealed their blocks meanwhile."""
        while True:
            try:
                return read(self._grids, what)
            except FileNotFoundError:
                self._use(read_manifest(self.path))
                self._refresh()

    def chunks(self) -> Iterator[tuple[Int[np.ndarray, " rows"], Int[np.ndarray, "rows height width"]]]:
        """Rows whose tokens are stored, ascending, with their grids, in chunks of thousands."""
        written = self.written()
        for rows in spans(0, len(self)):
            if (stored := rows[written[rows]]).size:
                yield stored, self._lasting(Grids.gather, stored)

    def written(self) -> Bool[np.ndarray, " rows"]:
        """For every row, True if its tokens are stored."""
        self._refresh()
        return self._grids.there()

    def missing(self, with_skipped: bool = False) -> Int[np.ndarray, " rows"]:
        """Rows (int64, ascending) whose tokens are not written yet.

        Args:
            with_skipped: whether images that were skipped count as missing.
        """
        missing = ~self.written()
        if not with_skipped:
            missing[list(self._grids.skipped)] = False
        return np.flatnonzero(missing)

    def write(
        self,
        rows: Sequence[int] | np.ndarray,
        grids: Int[np.ndarray, "rows height width"],
        skipped: Mapping[int, str] | None = None,
    ) -> None:
        """Store token grids; they are on disk when this returns, and a killed run leaves them missing.

        Any number of processes may write to a store at once.

        Args:
            rows: row of each grid, without duplicates.
            grids: (len(rows), H, W) ids (array or CPU tensor).
            skipped: rows of images that cannot be decoded, with the reason.

        Raises:
            TokenStoreError: wrong shape, ids outside 0..vocab_size - 1, or rows outside the store.
        """
        rows, grids, skipped = np.asarray(rows, dtype=np.int64), np.asarray(grids), dict(skipped or {})
        if problem := self._misfit(rows, grids, np.append(rows, np.fromiter(skipped, dtype=np.int64))):
            raise TokenStoreError(f"token store `{self.path}` {problem}")
        if rows.size or skipped:
            names = [self.names[row] for row in rows.tolist()]
            write_block(self.path, self._manifest, rows, names, grids, skipped)

    def _misfit(self, rows: np.ndarray, grids: np.ndarray, every: np.ndarray) -> str | None:
        """Why these grids, or any of these rows, cannot be stored."""
        if grids.shape != (*rows.shape, *self.grid) or rows.ndim != 1:
            shape = (*rows.shape, *self.grid)
            return f"takes grids of shape {shape} for {rows.size} rows, got {grids.shape}"
        if not np.issubdtype(grids.dtype, np.integer):
            return f"takes integer ids, got {grids.dtype}"
        if grids.size and not (grids.min() >= 0 and grids.max() < self.vocab_size):
            return (
                f"takes ids from 0 to {self.vocab_size - 1} (its vocab_size), got {grids.min()} to "
                f"{grids.max()}: it was made for another tokenizer"
            )
        if every.size and not (every.min() >= 0 and every.max() < len(self)):
            return f"has rows 0 to {len(self) - 1}, got {every.min()} to {every.max()}"
        return "takes each row once, got one twice" if len(np.unique(every)) != len(every) else None

    @property
    def sealed(self) -> bool:
        """Whether all tokens are in files with checksums, and none in blocks."""
        self._refresh()
        return self._manifest.sealed_rows >= len(self) and not self._grids.blocks

    def seal(self) -> None:
        """Join the blocks into files with checksums; call it once all rows are written.

        If images were added meanwhile, the process that writes their tokens seals.

        Raises:
            TokenStoreError: rows are missing.
        """
        if missing := self.missing().size:
            raise TokenStoreError(
                f"token store `{self.path}` misses the tokens of {missing} images: {REMEDY} to complete it"
            )
        while not (newest := TokenStore.open(self.path)).sealed and not newest.missing().size:
            # If another process sealed first, look again at what is left to do.
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                join_blocks(self.path, newest._manifest, newest._grids)

    def verify_checksums(self) -> None:
        """Read all files and compare them with the checksums that sealing recorded.

        Raises:
            TokenStoreError: a file has changed since sealing, or the store is not sealed.
        """
        if not self.sealed:
            raise TokenStoreError(f"token store `{self.path}` has no checksums yet: {REMEDY} to complete it")
        check_files(self.path, self._manifest)

    def _refresh(self) -> None:
        """Add what was written since; newer generations count only if they seal rows of this one."""
        while newest_generation(self.path) > self._manifest.generation or not self._grids.refresh():
            self._use(read_manifest(self.path))

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "names": self._names, "manifest": self._manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path, self._names = state["path"], state["names"]
        self._use(state["manifest"])

    def __repr__(self) -> str:
        return (
            f"TokenStore({str(self.path)!r}, {len(self)} images, grid {self.grid}, "
            f"vocab_size {self.vocab_size}, tokenizer {self.tokenizer[:12]})"
        )


def write_names(store: Path, manifest: Manifest, names: Sequence[str], shown: Path | None = None) -> None:
    """Make a generation of a store with these names.

    Args:
        store: the store's folder.
        manifest: what the store is.
        names: image names by row.
        shown: the path that an error names, if the folder has not its name yet.

    Raises:
        TokenStoreError: the names cannot be rows.
        FileExistsError: another process has made the generation meanwhile.
    """
    try:
        content = names_file(names)
    except ValueError as error:
        raise TokenStoreError(f"token store `{shown or store}`: {error}") from None
    write_generation(
        store,
        manifest,
        "names.safetensors",
        [content],
        len(names),
        lambda file: {"names": file, "origin": manifest.origin or file.sha256},
    )


def _refuse_existing(path: Path, manifest: Manifest, names: Sequence[str]) -> None:
    if not any(path.glob("generation-*")):
        raise TokenStoreError(f"`{path}` exists and is not a token store: choose another path or remove it")
    store = TokenStore.open(path)
    other = [key for key in IDENTITY if getattr(store, key) != getattr(manifest, key)]
    if list(store.names) != names:
        other.append("names")
    if other:
        raise TokenStoreError(
            f"token store `{path}` exists with other {', '.join(other)}: choose another path or remove it"
        )
    raise TokenStoreError(
        f"token store `{path}` exists with the same names, grid and tokenizer: "
        "continue it with TokenStore.open (tools/extract_tokens.py does)"
    )
