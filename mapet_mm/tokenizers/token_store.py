"""The token store: one grid of token ids per image in one file, looked up by the image's name.

Ids are written through a memory map and read by positioned reads. Both go through the system's page
cache, which all workers share; but pages of a map that a worker has touched count as its own resident
memory (600 MB on ImageNet after an epoch in random order), and a read's do not.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Int

from mapet_mm.file_replacement import replace_file
from mapet_mm.tokenizers import token_files as files
from mapet_mm.tokenizers.token_files import (
    FORMAT,
    GRIDS_FILE,
    MARKS_FILE,
    META_FILE,
    REMEDY,
    VERSION,
    TokenStoreError,
)
from mapet_mm.tokenizers.token_names import NAME_FILES, TokenNames


class MissingTokensError(TokenStoreError, KeyError):
    """An image that the token store does not know, or whose tokens are not written yet."""

    # KeyError would print the message in quotes.
    __str__ = ValueError.__str__


class TokenStore:
    """A directory with a grid of token ids for each named image; made by `create`, read through `open`.

    `meta.json` says what is in it; `grids.bin` holds the ids (rows, H, W); `names.txt` the names in byte
    order, image paths relative to the data root. While rows are missing, `marks.bin` has one byte per row, 1
    once the row is written; sealing a complete store replaces it by checksums in `meta.json`.
    Opening reads no names; files are opened when first used, so a store can be pickled and used after a fork.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self._meta = files.read_meta(self.path)
        files.check_sizes(self.path, self._meta)
        self._close()

    @classmethod
    def open(cls, path: str | os.PathLike) -> TokenStore:
        """Open an existing token store.

        Raises:
            TokenStoreError: it is missing, not a token store, or one of its files is truncated.
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
            preprocessing: what the tokenizer saw: the configs of its `pipeline` and `data_preprocessor`.

        Raises:
            TokenStoreError: something is at `path` already, or the names cannot be stored.
        """
        path, names = Path(path), list(names)
        name_files = files.index(path, names)
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "rows": len(names),
            "bytes": {name: len(content) for name, content in name_files.items()},
            "grid": [int(side) for side in grid],
            "vocab_size": int(vocab_size),
            "dtype": "uint16" if vocab_size <= 2**16 else "uint32",
            "tokenizer": tokenizer,
            "data_root": None if data_root is None else str(data_root),
            "preprocessing": None if preprocessing is None else dict(preprocessing),
        }
        if path.exists():
            _refuse_existing(path, meta, name_files)
        os.rename(files.make_folder(path, meta, name_files), path)
        return cls(path)

    @property
    def grid(self) -> tuple[int, int]:
        """(H, W) tokens of an image."""
        height, width = self._meta["grid"]
        return height, width

    @property
    def vocab_size(self) -> int:
        """All ids are below this."""
        return self._meta["vocab_size"]

    @property
    def tokenizer(self) -> str:
        """Digest of the tokenizer that made the ids."""
        return self._meta["tokenizer"]

    @property
    def data_root(self) -> str | None:
        """Folder that the names are relative to, as given when the store was made."""
        return self._meta["data_root"]

    @property
    def preprocessing(self) -> dict[str, Any] | None:
        """What the tokenizer saw, as given when the store was made; None in stores that do not record it."""
        return self._meta.get("preprocessing")

    @property
    def names(self) -> TokenNames:
        """The image names, by row; a sequence that reads them from disk as it goes."""
        if self._names is None:
            paths = {name: files.file_path(self.path, name, self._meta) for name in NAME_FILES}
            self._names = TokenNames(paths, self._meta["rows"])
        return self._names

    def __len__(self) -> int:
        return self._meta["rows"]

    def __contains__(self, name: str) -> bool:
        return self.row(name) is not None

    def __getitem__(self, name: str) -> Int[np.ndarray, "height width"]:
        """Token grid (H, W) of an image, a copy, as uint16 (uint32 past 65,536 ids).

        Raises:
            MissingTokensError: the store does not know the name, or its tokens are not written yet.
        """
        row = self.row(name)
        if row is None:
            raise MissingTokensError(f"token store `{self.path}` has no image `{name}`: {REMEDY} on it")
        if self._file is None:
            self._open_files()
        if self._marks is not None and not self._marks[row]:
            raise MissingTokensError(
                f"token store `{self.path}` has no tokens for image `{name}` yet: {REMEDY} to complete it"
            )
        return self._read(row)

    def written_grids(self) -> Iterator[tuple[str, Int[np.ndarray, "height width"]]]:
        """Name and token grid of each image whose tokens are stored, in the order of rows."""
        if self._file is None:
            self._open_files()
        for row, (name, written) in enumerate(zip(self.names, self.written(), strict=True)):
            if written:
                yield name, self._read(row)

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

    def row(self, name: str) -> int | None:
        """Row of an image name, or None if the store does not know it."""
        return self.names.find(name)

    @property
    def sealed(self) -> bool:
        """Whether the store is complete and has checksums."""
        return "sha256" in self._meta

    def written(self) -> np.ndarray:
        """Boolean mark of every row: True where its tokens are stored."""
        return files.read_marks(self.path) != 0

    def missing(self) -> np.ndarray:
        """Rows (int64, ascending) whose tokens are not written yet."""
        return np.flatnonzero(files.read_marks(self.path) == 0)

    def write(self, rows: Sequence[int] | np.ndarray, grids: Int[np.ndarray, "rows height width"]) -> None:
        """Store token grids and mark their rows; a run killed in between leaves the rows missing, not wrong.

        Several processes may write to one store at a time, each its own rows.

        Args:
            rows: row of each grid, no row twice.
            grids: (len(rows), H, W) ids (array or CPU tensor).

        Raises:
            TokenStoreError: wrong shape, ids outside 0..vocab_size - 1, or rows outside the store.
        """
        rows, grids = np.asarray(rows, dtype=np.int64), np.asarray(grids)
        self._check_written(rows, grids)
        if self.sealed:
            self._unseal()
        marks, stored = self._map(MARKS_FILE, "r+"), self._map(GRIDS_FILE, "r+")
        if marks[rows].any():
            marks[rows] = 0
            marks.flush()
        # The ids are on disk before their mark: a mark never stands for ids that were not written.
        stored[rows] = grids
        stored.flush()
        marks[rows] = 1
        marks.flush()

    def seal(self) -> None:
        """Record the files' checksums and drop the marks; call it once all rows are written.

        Raises:
            TokenStoreError: rows are missing.
        """
        if missing := self.missing().size:
            raise TokenStoreError(
                f"token store `{self.path}` misses the tokens of {missing} images: {REMEDY} to complete it"
            )
        if not self.sealed:
            self._change_meta({**self._meta, "sha256": files.checksums(self.path, self._meta)})
        files.file_path(self.path, MARKS_FILE, self._meta).unlink(missing_ok=True)

    def _unseal(self) -> None:
        marks = files.file_path(self.path, MARKS_FILE, self._meta)
        replace_file(marks, bytes([1]) * len(self))
        self._change_meta({key: value for key, value in self._meta.items() if key != "sha256"})

    def verify_checksums(self) -> None:
        """Read all files and compare them with the checksums that sealing recorded.

        Raises:
            TokenStoreError: a file has changed since, or the store is not sealed.
        """
        if not self.sealed:
            raise TokenStoreError(f"token store `{self.path}` has no checksums yet: {REMEDY} to complete it")
        for name, found in files.checksums(self.path, self._meta).items():
            if found != self._meta["sha256"][name]:
                raise TokenStoreError(
                    f"token store file `{files.file_path(self.path, name, self._meta)}` has changed since "
                    "it was written (its checksum differs): restore it, or delete the token store and re-run "
                    "tools/extract_tokens.py"
                )

    def _check_written(self, rows: np.ndarray, grids: np.ndarray) -> None:
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
        if rows.size and not (rows.min() >= 0 and rows.max() < len(self)):
            raise TokenStoreError(
                f"token store `{self.path}` has rows 0 to {len(self) - 1}, got {rows.min()} to {rows.max()}"
            )

    def _change_meta(self, meta: dict[str, Any]) -> None:
        files.write_meta(self.path, meta)
        self._meta = meta
        self._close()

    def _read(self, row: int) -> Int[np.ndarray, "height width"]:
        grid = np.empty(self._shape, self._dtype)
        os.preadv(self._file.fileno(), [grid], row * grid.nbytes)
        return grid

    def _map(self, name: str, mode: str) -> np.memmap:
        return files.map_file(self.path, name, self._meta, mode)

    def _open_files(self) -> None:
        # The store may have been sealed since it was opened here.
        self._meta = files.read_meta(self.path)
        # A plain view: indexing the memmap class itself costs several times the rest of a look-up.
        self._marks = None if self.sealed else self._map(MARKS_FILE, "r").view(np.ndarray)
        path = files.file_path(self.path, GRIDS_FILE, self._meta)
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self._shape, self._dtype = self.grid, np.dtype(self._meta["dtype"])

    def _close(self) -> None:
        self._names: TokenNames | None = None
        self._marks: np.ndarray | None = None
        self._file: BinaryIO | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_meta": self._meta}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._close()

    def __repr__(self) -> str:
        return (
            f"TokenStore({str(self.path)!r}, {len(self)} images, grid {self.grid}, "
            f"vocab_size {self.vocab_size}, tokenizer {self.tokenizer[:12]})"
        )


def _refuse_existing(path: Path, meta: dict[str, Any], name_files: dict[str, bytes]) -> None:
    if not (path / META_FILE).exists():
        raise TokenStoreError(f"`{path}` exists and is not a token store: choose another path or remove it")
    store = TokenStore.open(path)
    other = [key for key in ("grid", "vocab_size", "tokenizer") if store._meta[key] != meta[key]]
    if store._meta["bytes"].keys() != name_files.keys() or any(
        content != files.file_path(path, name, store._meta).read_bytes()
        for name, content in name_files.items()
    ):
        other.append("names")
    if other:
        raise TokenStoreError(
            f"token store `{path}` exists with other {', '.join(other)}: choose another path or remove it"
        )
    raise TokenStoreError(
        f"token store `{path}` exists with the same names, grid and tokenizer: "
        "continue it with TokenStore.open (tools/extract_tokens.py does)"
    )
