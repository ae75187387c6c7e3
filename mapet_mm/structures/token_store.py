"""The token store: one grid of token ids per image, looked up by the image's name.

A store is a folder. `manifest.json` has an id, drawn when the store is created, the store's identity and the
file of its names. Image i is row i, and rows lie in parts of 1,024: `parts/00017-<id>.safetensors`. A part is
replaced in one step. Its name has the id, so the files of a store that was replaced are never taken for those
of the new one. Whoever reads a part or the manifest in order to replace it holds `.lock` meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Int64
from mmengine.utils import to_2tuple
from tqdm import tqdm

from mapet_mm.structures.image_files import require_same_files
from mapet_mm.structures.manifest import EXTRACT, MANIFEST, new_store_folder, read_manifest, write_names
from mapet_mm.structures.names import StoredNames, name_hash
from mapet_mm.structures.parts import PENDING, SKIPPED, WRITTEN, Parts
from mapet_mm.structures.tensor_file import HOW_TO_RESTORE, TensorFile, TokenStoreError
from mapet_mm.utils.atomic_files import replace_json
from mapet_mm.utils.identity import explain
from mapet_mm.utils.shared_work import shared_lock

PART_ROWS = 1024
# Entries by which two stores fit together.
IDENTITY_KEYS = ("grid", "vocab_size", "tokenizer", "data_root", "preprocessing")
LOCK = ".lock"
NO_TOKENIZER = "none"  # in place of a digest


class MissingTokensError(TokenStoreError, KeyError):
    """An image is not in the token store, or its tokens are not written yet."""


class TokenStore:
    """A folder with a grid of token ids for each named image; made by `create`, read through `open`.

    Any number of processes may write at once, and die at any time. Files that images are looked up in stay
    open; a store can be pickled, and used after a fork.

    Attributes:
        path: the folder.
        id: drawn when the store was created.
        grid: (H, W) tokens of an image.
        vocab_size: all ids are below this.
        tokenizer: digest of the tokenizer that made the ids.
        data_root: folder that the names are relative to, as given when the store was made.
        preprocessing: how images were prepared (`pipeline`, `data_preprocessor`), if recorded.
        names: the image names by row, in a sequence that reads them from disk when accessed.
        parts: the grids, in files of 1,024 rows.

    Examples:
        >>> from mapet_mm.tokenizers import TokenStore, extend_store
        >>> names = ["train/cat.png", "train/dog.png"]
        >>> store = TokenStore.create("tokens", names, grid=2, vocab_size=8, tokenizer="3fa2")
        >>> store.write(rows=[1], grids=[[[7, 0], [1, 1]]])
        >>> store["train/dog.png"].tolist()
        [[7, 0], [1, 1]]
        >>> store.missing().tolist()
        [0]
        >>> extend_store("tokens", ["val/cow.png"]).missing().tolist()
        [0, 2]
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        self.identity = {key: self.manifest[key] for key in IDENTITY_KEYS}
        self.id = self.manifest["id"]
        self.tokenizer = self.manifest["tokenizer"]
        self.grid = tuple(self.manifest["grid"])
        self.vocab_size = self.manifest["vocab_size"]
        self.data_root = self.manifest["data_root"]
        self.preprocessing = self.manifest["preprocessing"]
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)
        self.names = StoredNames(self.manifest["rows"], self._open_names)
        self.parts = Grids(self)

    @classmethod
    def open(cls, path: str | os.PathLike) -> TokenStore:
        """Open an existing token store; TokenStoreError if it is missing or not a token store."""
        return cls(path)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike,
        names: Iterable[str],
        grid: int | Sequence[int],
        vocab_size: int,
        tokenizer: str,
        data_root: str | os.PathLike | None = None,
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
            TokenStoreError: something is at `path` already, or a name is given twice.
        """
        identity = {
            "grid": tuple(int(side) for side in to_2tuple(grid)),
            "vocab_size": int(vocab_size),
            "tokenizer": tokenizer,
            "data_root": None if data_root is None else str(data_root),
            "preprocessing": preprocessing,
        }
        with new_store_folder(Path(path), list(names), identity):
            pass
        return cls(path)

    def __len__(self) -> int:
        return self.manifest["rows"]

    def __contains__(self, name: str) -> bool:
        return self.row(name) is not None

    @property
    def has_tokens(self) -> bool:
        """False of images that get none (`images_store`)."""
        return self.tokenizer != NO_TOKENIZER

    def row(self, name: str) -> int | None:
        """Row of an image name, or None if the store does not have it."""
        return self.names.find(name_hash(name))

    def rows(self, names: Iterable[str]) -> Int64[np.ndarray, " names"]:
        """Rows of many image names, -1 where the store does not have one; far faster than `row` for each."""
        return self.names.find_all(names)

    def require_tokenizer(self, digest: str, whose: str) -> None:
        """Raise TokenStoreError if another tokenizer made the ids; `whose` names this one in the message."""
        if self.tokenizer != digest:
            raise TokenStoreError(
                f"token store `{self.path}` was made by tokenizer {self.tokenizer[:12]}, but {whose} is "
                f"{digest[:12]}: re-extract into another store, or use the other one"
            )

    def require_settings(
        self, grid: tuple[int, int], preprocessing: Mapping[str, Any], data_root: str | os.PathLike
    ) -> None:
        """Raise TokenStoreError if the store has another grid, preprocessing or folder of images."""
        root = os.path.realpath(data_root)
        own_root = os.path.realpath(self.data_root or root)
        whose = f"token store `{self.path}`"
        remedy = (
            "bring that one back, give this one another name, so that it counts as new, or choose another "
            "`token_store`"
        )
        if require_same_files(self.manifest.get("files"), root, whose, remedy, TokenStoreError):
            own_root = root
        before = {"grid": self.grid, "preprocessing": self.preprocessing, "data_root": own_root}
        now = {"grid": grid, "preprocessing": preprocessing, "data_root": root}
        difference = explain(before, now)
        if difference:
            raise TokenStoreError(
                f"token store `{self.path}` was made with other settings ({difference}): choose another "
                "`token_store`; if the folder of images was moved, leave a link to it in its old place"
            )

    def require_unreplaced(self) -> None:
        """Raise TokenStoreError if another store was made at the path since this one was opened."""
        current_id = "gone"
        if (self.path / MANIFEST).exists():
            current_id = read_manifest(self.path)["id"]
        if current_id != self.id:
            raise TokenStoreError(
                f"token store `{self.path}` was replaced while it was in use (id {self.id}, now "
                f"{current_id}): start this command again"
            )

    def __getitem__(self, name: str) -> Int[np.ndarray, "height width"]:
        """Token grid (H, W) of an image, a copy, as uint16 (uint32 past 65,536 ids).

        Raises:
            MissingTokensError: there are no tokens of this name (yet), or the image was skipped.
            TokenStoreError: the store was replaced, or its file is damaged.
        """
        key = name_hash(name)
        row = self.names.find(key)
        if row is None:
            raise MissingTokensError(f"token store `{self.path}` has no image `{name}`: {EXTRACT} on it")
        file, state = self.parts.file_of(row, key)
        if state != WRITTEN:
            raise self._missing_tokens(name, file, state)
        grid = np.empty(self.grid, self.dtype)
        file.read_row(self.parts.kind, row % PART_ROWS, grid)
        return grid

    def _missing_tokens(self, name: str, file: TensorFile | None, state: int) -> MissingTokensError:
        """The error of an image that is pending or was skipped."""
        no_tokens = f"token store `{self.path}` has no tokens for image `{name}`"
        if state == SKIPPED:
            reason = file.about()["skipped"][name]
            return MissingTokensError(f"{no_tokens} that it skipped ({reason}, --retry-skipped): {EXTRACT}")
        return MissingTokensError(f"{no_tokens} yet: {EXTRACT}")

    def grids(self, rows: Sequence[int] | np.ndarray) -> Int[np.ndarray, "rows height width"]:
        """Token grids of many rows, whose names are not looked at; errors are those of `store[name]`."""
        grids = np.empty((len(rows), *self.grid), self.dtype)
        for row, grid in zip(rows, grids, strict=True):
            if not self.parts.read_row(int(row), grid):
                self[self.names[int(row)]]  # says why there are none
        return grids

    @property
    def skipped(self) -> dict[str, str]:
        """Images that could not be decoded and have no tokens, by name, with the reason."""
        return self.parts.skipped

    def written(self) -> Bool[np.ndarray, " rows"]:
        """For every row, True if its tokens are stored."""
        return self.parts.all_states() == WRITTEN

    def missing(self) -> Int64[np.ndarray, " rows"]:
        """Rows (int64, ascending) whose tokens are not written yet; images that were skipped do not count."""
        return np.flatnonzero(self.parts.all_states() == PENDING)

    def chunks(self) -> Iterator[tuple[Int64[np.ndarray, " rows"], Int[np.ndarray, "rows height width"]]]:
        """Rows whose tokens are stored, ascending, with their grids, part by part."""
        for part in range(len(self.parts)):
            rows = np.array(self.parts.part_range(part))
            content = self.parts.read_part(part)
            slots = np.flatnonzero(content.states[: len(rows)] == WRITTEN)
            if slots.size:
                yield rows[slots], content.values[slots]

    def write(
        self,
        rows: Sequence[int] | np.ndarray,
        grids: Int[np.ndarray, "rows height width"],
        skipped: Mapping[int, str] | None = None,
    ) -> None:
        """Store token grids; they are on disk when this returns, and a killed run leaves them pending.

        Each part with one of the rows is read, checked and replaced, so write many neighbouring rows at once.
        Other writers wait meanwhile, on any machine whose file system shares locks.

        Args:
            rows: row of each grid, without duplicates.
            grids: (len(rows), H, W) ids (array or CPU tensor).
            skipped: rows of images that cannot be decoded, with the reason.

        Raises:
            TokenStoreError: wrong shape, ids or rows, a damaged part, or the store was replaced.
        """
        rows = np.asarray(rows, dtype=np.int64)
        grids = np.asarray(grids)
        skipped = dict(skipped or {})
        all_rows = np.append(rows, np.fromiter(skipped, dtype=np.int64))
        self._check_write(rows, grids, all_rows)
        for part in np.unique(all_rows // PART_ROWS).tolist():
            in_part = rows // PART_ROWS == part
            slots = (rows[in_part] % PART_ROWS).tolist()
            reasons = {row % PART_ROWS: why for row, why in skipped.items() if row // PART_ROWS == part}
            self.parts.update(part, slots, grids[in_part], reasons)

    def _check_write(self, rows: np.ndarray, grids: np.ndarray, all_rows: np.ndarray) -> None:
        problem = None
        if grids.shape != (*rows.shape, *self.grid) or not np.issubdtype(grids.dtype, np.integer):
            shape = (rows.size, *self.grid)
            problem = f"takes integer ids of shape {shape}, got {grids.dtype} of {grids.shape}"
        elif all_rows.size and not (all_rows.min() >= 0 and all_rows.max() < len(self)):
            problem = f"has rows 0 to {len(self) - 1}, got {all_rows.min()} to {all_rows.max()}"
        if problem:
            raise TokenStoreError(f"token store `{self.path}` {problem}")

    def lock(self) -> AbstractContextManager:
        """The lock of whoever reads a part or the manifest in order to replace it."""
        return shared_lock(self.path / LOCK)

    def verify(self) -> None:
        """Raise TokenStoreError if a file has changed since it was written, by their digests."""
        names = self.path / self.manifest["names"]
        if sha256(names.read_bytes()).hexdigest() != self.manifest["names_sha256"]:
            raise TokenStoreError(
                f"token store file `{names}` has changed since it was written: {HOW_TO_RESTORE}"
            )
        self.parts.verify()

    def _open_names(self) -> TensorFile:
        try:
            return TensorFile(self.path / self.manifest["names"])
        except FileNotFoundError:
            self.require_unreplaced()
            raise TokenStoreError(f"token store `{self.path}` has lost its names: {HOW_TO_RESTORE}") from None


class Grids(Parts):
    """The token grids of a store: a part has room for the images by which a store is extended."""

    def __init__(self, store: TokenStore) -> None:
        super().__init__(store.path, store.id, "grids", store.grid, store.dtype, store.names, PART_ROWS)
        self.store = store

    def lock(self) -> AbstractContextManager:
        """The store's lock."""
        return self.store.lock()

    def require_unreplaced(self) -> None:
        """Raise TokenStoreError if another store was made at the path."""
        self.store.require_unreplaced()

    def update(
        self, part: int, slots: Sequence[int], values: Sequence[np.ndarray], reasons: Mapping[int, str]
    ) -> None:
        """As for all parts; TokenStoreError if a grid has ids that the store does not take."""
        ids = np.asarray(values)
        last = self.store.vocab_size - 1
        if ids.size and not (ids.min() >= 0 and ids.max() <= last):
            raise TokenStoreError(
                f"token store `{self.store.path}` takes ids from 0 to {last}, got {ids.min()} to {ids.max()}"
            )
        super().update(part, slots, values, reasons)


def extend_store(path: str | os.PathLike, names: Iterable[str]) -> TokenStore:
    """Append rows for further images, whose tokens are not written yet; the store changes in one step.

    Readers that have the store open keep the images that they know. TokenStoreError if a name is there
    already or given twice.
    """
    with TokenStore.open(path).lock():
        store = TokenStore.open(path)  # as the last process with the lock has left it
        write_names(store.path, store.manifest, [*store.names, *names])
    return TokenStore.open(path)


def move_images(path: str | os.PathLike, data_root: str | os.PathLike) -> TokenStore:
    """Record the folder in which the images of a store lie now; the store changes in one step."""
    with TokenStore.open(path).lock():
        manifest = TokenStore.open(path).manifest
        replace_json(Path(path) / MANIFEST, {**manifest, "data_root": str(data_root)})
    return TokenStore.open(path)


def merge_stores(path: str | os.PathLike, stores: Sequence[TokenStore]) -> TokenStore:
    """Merge stores without common images into a new store, which appears complete or not at all.

    Rows pending in them are pending in the new store.

    Raises:
        TokenStoreError: something is at `path` already, the stores do not fit together, or one is damaged.
    """
    for store in stores:
        difference = explain(stores[0].identity, store.identity)
        if difference:
            raise TokenStoreError(
                f"token stores `{stores[0].path}` and `{store.path}` do not fit together ({difference})"
            )
    names = sorted(name for store in stores for name in store.names)
    with new_store_folder(Path(path), names, stores[0].identity) as folder:
        merged = TokenStore(folder)
        for store in stores:
            merged_rows = merged.rows(store.names)
            for rows, grids in tqdm(store.chunks(), f"merging {store.path}", len(store.parts), unit="part"):
                merged.write(merged_rows[rows], grids)
            skipped = store.skipped
            skipped_rows = merged.rows(skipped).tolist()
            no_grids = np.empty((0, *store.grid), store.dtype)
            merged.write([], no_grids, dict(zip(skipped_rows, skipped.values(), strict=True)))
    return TokenStore.open(path)
