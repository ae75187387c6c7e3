"""The token store: one grid of token ids per image, looked up by the image's name.

A store is a folder. `manifest.json` has an id, drawn when the store is created, the store's identity and the
file of its names. Image i is row i, and rows lie in parts of 1,024: `parts/00017-<id>.safetensors`. A part is
replaced in one step. Its name has the id, so the files of a store that was replaced are never taken for those
of the new one.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from jaxtyping import Bool, Int, Int64, UInt8, UInt64
from safetensors import safe_open

from mapet_mm.structures import store_files as files
from mapet_mm.structures.store_files import MISSING, PART_ROWS, SKIPPED, WRITTEN, TokenStoreError
from mapet_mm.utils.atomic_files import new_folder, replace_file, replace_json
from mapet_mm.utils.config import pair

FORMAT = {"format": "mapet_mm.token_store", "version": 4}
IDENTITY = ("grid", "vocab_size", "tokenizer", "data_root", "preprocessing")
MANIFEST = "manifest.json"
LOCK = ".lock"
REMEDY = "run tools/extract_tokens.py with the tokenizer's config"


class MissingTokensError(TokenStoreError, KeyError):
    """An image is not in the token store, or its tokens are not written yet."""


class TokenStore:
    """A folder with a grid of token ids for each named image; made by `create`, read through `open`.

    Any number of processes may write at once, and die at any time. No file stays open, so a store can be
    pickled, and used after a fork.

    Attributes:
        path: the folder.
        id: drawn when the store was created.
        grid: (H, W) tokens of an image.
        vocab_size: all ids are below this.
        tokenizer: digest of the tokenizer that made the ids.
        data_root: folder that the names are relative to, as given when the store was made.
        preprocessing: how images were prepared (`pipeline`, `data_preprocessor`), if recorded.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self.manifest = manifest = read_manifest(self.path)
        self.identity = {key: manifest[key] for key in IDENTITY}
        self.id, self.tokenizer = manifest["id"], manifest["tokenizer"]
        self.grid, self.vocab_size = tuple(manifest["grid"]), manifest["vocab_size"]
        self.data_root, self.preprocessing = manifest["data_root"], manifest["preprocessing"]
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

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
            TokenStoreError: something is at `path` already, or a name is given twice.
            ValueError: `grid` is not one or two whole numbers above 0.
        """
        root = None if data_root is None else str(data_root)
        identity = (pair("grid", grid), int(vocab_size), tokenizer, root, preprocessing)
        with new_store(Path(path), list(names), dict(zip(IDENTITY, identity, strict=True))):
            pass
        return cls(path)

    @cached_property
    def names(self) -> files.StoredNames:
        """The image names by row, in a sequence that reads them from disk when accessed."""
        return files.StoredNames(self.path / self.manifest["names"], len(self), self._opened)

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

    def __getitem__(self, name: str) -> Int[np.ndarray, "height width"]:
        """Token grid (H, W) of an image, a copy, as uint16 (uint32 past 65,536 ids).

        Raises:
            MissingTokensError: there are no tokens of this name (yet), or the image was skipped.
            TokenStoreError: the store was replaced, or its file is damaged.
        """
        row = self.row(name)
        if row is None:
            raise MissingTokensError(f"token store `{self.path}` has no image `{name}`: {REMEDY} on it")
        number, place = divmod(row, PART_ROWS)
        with self._opened(self._file(number)) as file:
            state = MISSING if file is None else int(file.get_slice("states")[place])
            if state != MISSING and file.get_slice("names")[place] != files.name_hashes([name])[0]:
                raise files.damaged(
                    self._file(number), f"row {row} has the tokens of another image than `{name}`"
                )
            if state == WRITTEN:
                return file.get_slice("grids")[place]
            lacking = f"that it skipped ({files.skipped_of(file)[name]}, --retry-skipped)" if state else "yet"
        raise MissingTokensError(
            f"token store `{self.path}` has no tokens for image `{name}` {lacking}: {REMEDY}"
        )

    @property
    def skipped(self) -> dict[str, str]:
        """Images that could not be decoded and have no tokens, by name, with the reason."""
        found: dict[str, str] = {}
        for number in range(self.parts):
            with self._opened(self._file(number)) as file:
                found |= files.skipped_of(file) if file else {}
        return found

    def states(self, part: int) -> UInt8[np.ndarray, " rows"]:
        """The state of each row of a part: MISSING, WRITTEN or SKIPPED."""
        rows = min(PART_ROWS, len(self) - part * PART_ROWS)
        with self._opened(self._file(part)) as file:
            return file.get_tensor("states")[:rows] if file else np.zeros(rows, np.uint8)

    def written(self) -> Bool[np.ndarray, " rows"]:
        """For every row, True if its tokens are stored."""
        return np.concatenate([self.states(part) for part in range(self.parts)]) == WRITTEN

    def missing(self) -> Int64[np.ndarray, " rows"]:
        """Rows (int64, ascending) whose tokens are not written yet; images that were skipped do not count."""
        return np.flatnonzero(np.concatenate([self.states(part) for part in range(self.parts)]) == MISSING)

    def chunks(self) -> Iterator[tuple[Int64[np.ndarray, " rows"], Int[np.ndarray, "rows height width"]]]:
        """Rows whose tokens are stored, ascending, with their grids, part by part."""
        for number in range(self.parts):
            part = self._read(number)
            places = np.flatnonzero(part.states[: len(self) - number * PART_ROWS] == WRITTEN)
            if places.size:
                yield places + number * PART_ROWS, part.grids[places]

    def write(
        self,
        rows: Sequence[int] | np.ndarray,
        grids: Int[np.ndarray, "rows height width"],
        skipped: Mapping[int, str] | None = None,
    ) -> None:
        """Store token grids; they are on disk when this returns, and a killed run leaves them missing.

        Each part with one of the rows is read, checked and replaced, so write many neighbouring rows at once.
        Other writers wait meanwhile, on any machine whose file system shares locks.

        Args:
            rows: row of each grid, without duplicates.
            grids: (len(rows), H, W) ids (array or CPU tensor).
            skipped: rows of images that cannot be decoded, with the reason.

        Raises:
            TokenStoreError: wrong shape, ids or rows, a damaged part, or the store was replaced.
        """
        rows, grids, skipped = np.asarray(rows, dtype=np.int64), np.asarray(grids), dict(skipped or {})
        every = np.append(rows, np.fromiter(skipped, dtype=np.int64))
        problem = None
        if grids.shape != (*rows.shape, *self.grid) or not np.issubdtype(grids.dtype, np.integer):
            shape = (rows.size, *self.grid)
            problem = f"takes integer ids of shape {shape}, got {grids.dtype} of {grids.shape}"
        elif grids.size and not (grids.min() >= 0 and grids.max() < self.vocab_size):
            problem = f"takes ids from 0 to {self.vocab_size - 1}, got {grids.min()} to {grids.max()}"
        elif every.size and not (every.min() >= 0 and every.max() < len(self)):
            problem = f"has rows 0 to {len(self) - 1}, got {every.min()} to {every.max()}"
        if problem:
            raise TokenStoreError(f"token store `{self.path}` {problem}")
        self.require_unreplaced()
        for number in np.unique(every // PART_ROWS).tolist():
            here = rows // PART_ROWS == number
            reasons = {row % PART_ROWS: why for row, why in skipped.items() if row // PART_ROWS == number}
            with self.lock():
                self._update(number, rows[here] % PART_ROWS, grids[here], reasons)

    def verify(self) -> None:
        """Raise TokenStoreError if a file has changed since it was written, by their digests."""
        names = self.path / self.manifest["names"]
        if sha256(names.read_bytes()).hexdigest() != self.manifest["names_sha256"]:
            raise TokenStoreError(
                f"token store file `{names}` has changed since it was written: {files.RESTORE}"
            )
        hashes = self.names.hashes()
        for number in range(self.parts):
            self._read(number, hashes[number * PART_ROWS : (number + 1) * PART_ROWS])

    def require_unreplaced(self) -> None:
        """Raise TokenStoreError if another store was made at the path since this one was opened."""
        now = read_manifest(self.path)["id"] if (self.path / MANIFEST).exists() else "gone"
        if now != self.id:
            raise TokenStoreError(
                f"token store `{self.path}` was replaced while it was in use (id {self.id}, now {now}): "
                "start this command again"
            )

    def lock(self) -> FileLock:
        """The lock of whoever reads a part or the manifest in order to replace it."""
        return FileLock(self.path / LOCK, mode=0o666)  # less the umask, as any file

    def _update(self, number: int, places: np.ndarray, grids: np.ndarray, reasons: Mapping[int, str]) -> None:
        """Replace a part by itself with some rows changed."""
        part = self._read(number)
        names = self.names[number * PART_ROWS : (number + 1) * PART_ROWS]
        part.names[: len(names)] = files.name_hashes(names)
        part.grids[places], part.states[places] = grids, WRITTEN
        part.states[list(reasons)] = SKIPPED
        for place in places.tolist():
            part.skipped.pop(names[place], None)
        skipped = part.skipped | {names[place]: why for place, why in reasons.items()}
        files.write_part(self._file(number), part._replace(skipped=dict(sorted(skipped.items()))))

    def _read(self, number: int, names: UInt64[np.ndarray, " rows"] | None = None) -> files.Part:
        """A whole part, checked against its digest and its images' names; an empty one if it is not there."""
        with self._opened(self._file(number)) as file:
            if file is None:
                grids = np.zeros((PART_ROWS, *self.grid), self.dtype)
                return files.Part(np.zeros(PART_ROWS, np.uint64), np.zeros(PART_ROWS, np.uint8), grids, {})
            part = files.read_part(file, self._file(number))
        if names is None:
            names = files.name_hashes(self.names[number * PART_ROWS : (number + 1) * PART_ROWS])
        if ((part.names[: len(names)] != names) & (part.states[: len(names)] != MISSING)).any():
            raise files.damaged(self._file(number), "it has the tokens of other images")
        return part

    def _file(self, number: int) -> Path:
        return self.path / "parts" / f"{number:05d}-{self.id}.safetensors"

    @contextmanager
    def _opened(self, path: Path) -> Iterator[safe_open | None]:
        """A file of the store; None if it is not there yet; a replaced store is an error."""
        if not path.exists():
            self.require_unreplaced()
            yield None
        else:
            with files.opened(path) as file:
                yield file


def read_manifest(store: Path) -> dict[str, Any]:
    path = store / MANIFEST
    if not path.exists():
        how = f"is not a token store (it has no {MANIFEST})" if store.is_dir() else "does not exist"
        raise TokenStoreError(f"token store `{store}` {how}: {REMEDY} or correct the path")
    manifest = json.loads(path.read_text())
    if not FORMAT.items() <= manifest.items():
        raise TokenStoreError(
            f"`{store}` is not a token store of version {FORMAT['version']}: {REMEDY} at another path"
        )
    return manifest


@contextmanager
def new_store(path: Path, names: Sequence[str], identity: Mapping[str, Any]) -> Iterator[TokenStore]:
    """A store with names and no tokens, which appears at `path` when the block ends."""
    try:
        with new_folder(path) as folder:
            (folder / "parts").mkdir()
            write_names(folder, {**FORMAT, "id": uuid.uuid4().hex[:12], **identity}, names)
            yield TokenStore(folder)
    except FileExistsError:
        raise TokenStoreError(
            f"`{path}` exists: choose another path or remove it; tools/extract_tokens.py continues a store"
        ) from None


def write_names(store: Path, manifest: Mapping[str, Any], names: Sequence[str]) -> None:
    """Write a file of names, and the manifest that counts it."""
    content = files.names_file(names)
    digest = sha256(content).hexdigest()
    file = f"names-{manifest['id']}-{digest[:12]}.safetensors"
    replace_file(store / file, content)
    replace_json(store / MANIFEST, {**manifest, "names": file, "names_sha256": digest, "rows": len(names)})
