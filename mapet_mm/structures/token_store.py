"""The token store: one grid of token ids per image, looked up by the image's name.

A store is a folder. `manifest.json` has an id, drawn when the store is created, the store's identity and the
file of its names. Image i is row i, and rows lie in parts of 1,024: `parts/00017-<id>.safetensors`. A part is
replaced in one step. Its name has the id, so the files of a store that was replaced are never taken for those
of the new one. Whoever reads a part or the manifest in order to replace it holds `.lock` meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Int64, UInt8, UInt64
from mmengine.utils import to_2tuple
from safetensors import safe_open

from mapet_mm.structures import store_files as files
from mapet_mm.structures.manifest import EXTRACT, IDENTITY_KEYS, MANIFEST, new_store_folder, read_manifest
from mapet_mm.structures.open_parts import OpenPart, OpenParts
from mapet_mm.structures.store_files import (
    GRIDS,
    PART_ROWS,
    PENDING,
    SKIPPED,
    WRITTEN,
    TokenStoreError,
    part_file,
)
from mapet_mm.structures.stored_names import StoredNames, name_hash, name_hashes
from mapet_mm.structures.tensor_file import TensorFile
from mapet_mm.utils.identity import explain, require_same_files
from mapet_mm.utils.shared_work import shared_lock

LOCK = ".lock"


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
        self._open_parts = OpenParts(self._open_part, GRIDS, self.require_unreplaced)

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

    @property
    def parts(self) -> int:
        """Number of parts; the rows of part p begin at `p * PART_ROWS`."""
        return -(-len(self) // PART_ROWS)

    def __len__(self) -> int:
        return self.manifest["rows"]

    def __contains__(self, name: str) -> bool:
        return self.row(name) is not None

    def row(self, name: str) -> int | None:
        """Row of an image name, or None if the store does not have it."""
        return self.names.find(name)

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
        row = self.row(name)
        if row is None:
            raise MissingTokensError(f"token store `{self.path}` has no image `{name}`: {EXTRACT} on it")
        grid = np.empty(self.grid, self.dtype)
        part, slot = self._open_parts.find(row)
        self._require_tokens(part, slot, row, name)
        part.read(slot, grid)
        return grid

    def _require_tokens(self, part: OpenPart | None, slot: int, row: int, name: str) -> None:
        """Raise an error if a part does not have an image's tokens in its slot."""
        no_tokens = f"token store `{self.path}` has no tokens for image `{name}`"
        state = PENDING if part is None else part.state(slot)
        if state == PENDING:
            raise MissingTokensError(f"{no_tokens} yet: {EXTRACT}")
        if part.name_hash(slot) != name_hash(name):
            path = self._part_file(row // PART_ROWS)
            raise files.damage_error(path, f"row {row} has the tokens of another image than `{name}`")
        if state == SKIPPED:
            reason = self.skipped_in(row // PART_ROWS)[name]
            raise MissingTokensError(f"{no_tokens} that it skipped ({reason}, --retry-skipped): {EXTRACT}")

    def grids(self, rows: Sequence[int] | np.ndarray) -> Int[np.ndarray, "rows height width"]:
        """Token grids of many rows, whose names are not looked at; errors are those of `store[name]`."""
        grids = np.empty((len(rows), *self.grid), self.dtype)
        for row, grid in zip(rows, grids, strict=True):
            if not self._open_parts.read(int(row), grid):
                self[self.names[int(row)]]  # says why there are none
        return grids

    @property
    def skipped(self) -> dict[str, str]:
        """Images that could not be decoded and have no tokens, by name, with the reason."""
        skipped: dict[str, str] = {}
        for part in range(self.parts):
            skipped.update(self.skipped_in(part))
        return skipped

    def skipped_in(self, part: int) -> dict[str, str]:
        """Images of a part that were skipped, by name, with the reason."""
        with self._open_file(self._part_file(part)) as file:
            return {} if file is None else files.skipped_of(file)

    def states(self, part: int) -> UInt8[np.ndarray, " rows"]:
        """The state of each row of a part: PENDING, WRITTEN or SKIPPED."""
        num_rows = min(PART_ROWS, len(self) - part * PART_ROWS)
        with self._open_file(self._part_file(part)) as file:
            if file is None:
                return np.full(num_rows, PENDING, np.uint8)
            return file.get_tensor("states")[:num_rows]

    def written(self) -> Bool[np.ndarray, " rows"]:
        """For every row, True if its tokens are stored."""
        return self._all_states() == WRITTEN

    def missing(self) -> Int64[np.ndarray, " rows"]:
        """Rows (int64, ascending) whose tokens are not written yet; images that were skipped do not count."""
        return np.flatnonzero(self._all_states() == PENDING)

    def _all_states(self) -> UInt8[np.ndarray, " rows"]:
        return np.concatenate([self.states(part) for part in range(self.parts)])

    def chunks(self) -> Iterator[tuple[Int64[np.ndarray, " rows"], Int[np.ndarray, "rows height width"]]]:
        """Rows whose tokens are stored, ascending, with their grids, part by part."""
        for part in range(self.parts):
            first_row = part * PART_ROWS
            content = self._read(part)
            slots = np.flatnonzero(content.states[: len(self) - first_row] == WRITTEN)
            if slots.size:
                yield first_row + slots, content.values[slots]

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
        self.require_unreplaced()
        for part in np.unique(all_rows // PART_ROWS).tolist():
            in_part = rows // PART_ROWS == part
            reasons = {row % PART_ROWS: why for row, why in skipped.items() if row // PART_ROWS == part}
            with self.lock():
                self._update(part, rows[in_part] % PART_ROWS, grids[in_part], reasons)

    def _check_write(self, rows: np.ndarray, grids: np.ndarray, all_rows: np.ndarray) -> None:
        problem = None
        if grids.shape != (*rows.shape, *self.grid) or not np.issubdtype(grids.dtype, np.integer):
            shape = (rows.size, *self.grid)
            problem = f"takes integer ids of shape {shape}, got {grids.dtype} of {grids.shape}"
        elif grids.size and not (grids.min() >= 0 and grids.max() < self.vocab_size):
            problem = f"takes ids from 0 to {self.vocab_size - 1}, got {grids.min()} to {grids.max()}"
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
                f"token store file `{names}` has changed since it was written: {files.HOW_TO_RESTORE}"
            )
        hashes = self.names.hashes()
        for part in range(self.parts):
            self._read(part, hashes[part * PART_ROWS : (part + 1) * PART_ROWS])

    def _update(self, part: int, slots: np.ndarray, grids: np.ndarray, reasons: Mapping[int, str]) -> None:
        """Replace a part by itself with some rows written and others skipped."""
        content = self._read(part)
        names = self.names[part * PART_ROWS : (part + 1) * PART_ROWS]
        content.names[: len(names)] = name_hashes(names)
        content.values[slots] = grids
        content.states[slots] = WRITTEN
        content.states[list(reasons)] = SKIPPED
        skipped = dict(content.skipped)
        for slot in slots.tolist():
            skipped.pop(names[slot], None)
        for slot, reason in reasons.items():
            skipped[names[slot]] = reason
        # In order, so that equal parts have equal bytes whoever wrote them.
        content = content._replace(skipped=dict(sorted(skipped.items())))
        files.write_part(self._part_file(part), content, GRIDS)
        self._open_parts.forget()

    def _read(self, part: int, hashes: UInt64[np.ndarray, " rows"] | None = None) -> files.Part:
        """A whole part, checked against its digest and its images' names; an empty one if it is not there."""
        path = self._part_file(part)
        with self._open_file(path) as file:
            if file is None:
                return files.empty_part(self.grid, self.dtype)
            content = files.read_part(file, path, GRIDS)
        if hashes is None:
            hashes = name_hashes(self.names[part * PART_ROWS : (part + 1) * PART_ROWS])
        is_other = content.names[: len(hashes)] != hashes
        has_tokens = content.states[: len(hashes)] != PENDING
        if (is_other & has_tokens).any():
            raise files.damage_error(path, "it has the tokens of other images")
        return content

    def _part_file(self, part: int) -> Path:
        return part_file(self.path / "parts", part, self.id)

    @contextmanager
    def _open_file(self, path: Path) -> Iterator[safe_open | None]:
        """A file of the store; None if it is not there yet; a replaced store is an error."""
        if not path.exists():
            self.require_unreplaced()
            yield None
        else:
            with files.open_file(path) as file:
                yield file

    def _open_part(self, part: int) -> TensorFile | None:
        """A part for reading single rows; None if it is not there yet; a replaced store is an error."""
        return self.open_tensors(self._part_file(part))

    def open_tensors(self, path: Path) -> TensorFile | None:
        """A file that belongs to the store; None if it is not there yet; a replaced store is an error."""
        try:
            return TensorFile(path)
        except FileNotFoundError:
            self.require_unreplaced()
            return None

    def _open_names(self) -> TensorFile:
        file = self.open_tensors(self.path / self.manifest["names"])
        if file is None:
            raise TokenStoreError(f"token store `{self.path}` has lost its names: {files.HOW_TO_RESTORE}")
        return file
