"""The files of a token store: what they are called, how large they are, how they come to be and change."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mapet_mm.errors import UserError
from mapet_mm.file_replacement import replace_file
from mapet_mm.tokenizers.token_names import NAME_FILES, index_names

FORMAT = "mapet_mm.token_store"
VERSION = 1
META_FILE = "meta.json"
GRIDS_FILE = "grids.bin"
MARKS_FILE = "marks.bin"
REMEDY = "run tools/extract_tokens.py with the tokenizer's config"
# Rows copied at a time from store to store.
COPIED_ROWS = 65536


class TokenStoreError(UserError, ValueError):
    """A token store that cannot be made, read or written; the message is one line that says what to do."""


def file_path(folder: Path, name: str, meta: Mapping[str, Any]) -> Path:
    """Path of one of a store's files; an extended store's carry the number of the extension."""
    generation = meta.get("generation", 0)
    if name == META_FILE or not generation:
        return folder / name
    stem, suffix = name.split(".")
    return folder / f"{stem}.{generation}.{suffix}"


def read_meta(folder: Path) -> dict[str, Any]:
    """What `meta.json` says, checked.

    Raises:
        TokenStoreError: the folder is missing, no token store, or damaged.
    """
    if not folder.is_dir():
        raise TokenStoreError(f"token store `{folder}` does not exist: {REMEDY} or correct the path")
    try:
        meta = json.loads((folder / META_FILE).read_text())
    except FileNotFoundError:
        raise TokenStoreError(f"`{folder}` is not a token store (no {META_FILE}): correct the path") from None
    except ValueError as error:
        raise TokenStoreError(
            f"token store file `{folder / META_FILE}` is damaged ({error}): {REMEDY}"
        ) from None
    if meta.get("format") != FORMAT or meta.get("version") != VERSION:
        raise TokenStoreError(
            f"`{folder}` is not a token store of version {VERSION}: {REMEDY} at another path"
        )
    return meta


def index(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Contents of the files that find a name's row, for the store at a path."""
    try:
        return index_names(names)
    except ValueError as error:
        raise TokenStoreError(f"token store `{path}`: {error}") from None


def write_meta(folder: Path, meta: Mapping[str, Any]) -> None:
    """Replace `meta.json` in one step."""
    replace_file(folder / META_FILE, (json.dumps(meta, indent=1) + "\n").encode())


def file_sizes(meta: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of each file but `meta.json`; a sealed store has no marks."""
    rows, (height, width) = meta["rows"], meta["grid"]
    sizes = {GRIDS_FILE: rows * height * width * np.dtype(meta["dtype"]).itemsize, **meta["bytes"]}
    return sizes if "sha256" in meta else {**sizes, MARKS_FILE: rows}


def check_sizes(folder: Path, meta: Mapping[str, Any]) -> None:
    """Raise TokenStoreError where a file is missing or truncated."""
    for name, expected in file_sizes(meta).items():
        file = file_path(folder, name, meta)
        found = file.stat().st_size if file.exists() else 0
        if found != expected:
            raise TokenStoreError(
                f"token store file `{file}` is truncated or damaged: expected {expected} bytes, found "
                f"{found}; restore it, or delete the token store and re-run tools/extract_tokens.py"
            )


def checksums(folder: Path, meta: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of each file that a sealed store keeps."""
    return {name: _sha256(file_path(folder, name, meta)) for name in (GRIDS_FILE, *meta["bytes"])}


def _sha256(path: Path) -> str:
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            sha.update(chunk)
    return sha.hexdigest()


def write_files(folder: Path, meta: Mapping[str, Any], name_files: Mapping[str, bytes]) -> None:
    """Make all files but `meta.json`, with no row written (holes take no disk space)."""
    for name, content in name_files.items():
        file_path(folder, name, meta).write_bytes(content)
    sizes = file_sizes(meta)
    for name in (GRIDS_FILE, MARKS_FILE):
        with open(file_path(folder, name, meta), "wb") as file:
            file.truncate(sizes[name])


def make_folder(path: Path, meta: Mapping[str, Any], name_files: Mapping[str, bytes]) -> Path:
    """A new store's folder beside its place, to be renamed to it when complete."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_files(partial, meta, name_files)
    write_meta(partial, meta)
    return partial


def map_file(folder: Path, name: str, meta: Mapping[str, Any], mode: str) -> np.memmap:
    """Memory map of the grids (rows, H, W) or of the marks (rows,)."""
    dtype, shape = ("uint8", ()) if name == MARKS_FILE else (meta["dtype"], tuple(meta["grid"]))
    return np.memmap(file_path(folder, name, meta), dtype, mode, shape=(meta["rows"], *shape))


def copy_rows(source: Path, target: Path, meta: Mapping[str, Any], rows: np.ndarray) -> None:
    """Copy a store's written grids and their marks into the rows of the files that `meta` tells of.

    Args:
        source: folder of the store to copy from.
        target: folder of the files to write.
        meta: of those files.
        rows: the row in `target` of each of the source's rows.
    """
    old_grids = map_file(source, GRIDS_FILE, read_meta(source), "r")
    old_marks = read_marks(source)
    grids = map_file(target, GRIDS_FILE, meta, "r+")
    marks = map_file(target, MARKS_FILE, meta, "r+")
    for start in range(0, len(rows), COPIED_ROWS):
        written = start + np.flatnonzero(old_marks[start : start + COPIED_ROWS])
        grids[rows[written]] = old_grids[written]
        marks[rows[written]] = 1
    grids.flush()
    marks.flush()


def read_marks(folder: Path) -> np.ndarray:
    """One byte a row, 1 where it is written."""
    meta = read_meta(folder)  # as it is now: another process may have sealed the store
    if "sha256" in meta:
        return np.ones(meta["rows"], dtype="uint8")
    # From the file, not a map: another process may be writing, and a scan leaves no pages mapped.
    return np.fromfile(file_path(folder, MARKS_FILE, meta), dtype="uint8")


def remove_files(folder: Path, meta: Mapping[str, Any]) -> None:
    """Remove what an earlier generation of the store has left."""
    for name in (GRIDS_FILE, MARKS_FILE, *NAME_FILES):
        file_path(folder, name, meta).unlink(missing_ok=True)
