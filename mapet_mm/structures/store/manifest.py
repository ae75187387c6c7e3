"""A token store's manifests: one per generation, of which the newest counts.

A generation is a folder that appears whole and never changes. Readers of an older one go on with it. If two
processes make the same generation, the second finds it there and starts over.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mapet_mm.structures.store.errors import REMEDY, RESTORE, TokenStoreError
from mapet_mm.utils.atomic_files import new_folder, replace_file, replace_json, wait_until_seen

FORMAT, VERSION = "mapet_mm.token_store", 3
MANIFEST, GENERATION = "manifest.json", "generation-"


class StoredFile(NamedTuple):
    """A file of the store: its path in the store, its checksum and its number of rows."""

    path: str
    sha256: str
    rows: int


@dataclass(frozen=True)
class Manifest:
    """Contents of a generation; the first arguments are those of `TokenStore.create`.

    Args:
        names: file of the names.
        grids: files of the grids, in the order of rows; the remaining rows are in blocks.
        skipped: images in these files that could not be decoded, by row, with the reason.
        origin: digest of the names that the store was made with. Blocks carry it, so they do not count in
            another store that is later created at this path.
        generation: number of the generation.
    """

    grid: tuple[int, int]
    vocab_size: int
    tokenizer: str
    data_root: str | None
    preprocessing: Mapping[str, Any] | None
    names: StoredFile | None = None
    grids: tuple[StoredFile, ...] = ()
    skipped: Mapping[int, str] = field(default_factory=dict)
    origin: str = ""
    generation: int = 0

    @property
    def dtype(self) -> str:
        """Type of the ids."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    @property
    def sealed_rows(self) -> int:
        """Number of rows in the files of the grids."""
        return sum(file.rows for file in self.grids)

    @property
    def next_folder(self) -> str:
        """Path of the next generation, relative to the store."""
        return f"{GENERATION}{self.generation + 1:04d}"


def write_generation(
    store: Path,
    manifest: Manifest,
    name: str,
    content: Iterable[bytes],
    rows: int,
    changes: Callable[[StoredFile], Mapping[str, Any]],
) -> None:
    """Make a store's next generation: one new file and the manifest that lists it.

    Args:
        store: the store's folder.
        manifest: of the previous generation.
        name: of the new file.
        content: of the new file, in parts.
        rows: number of rows in the new file.
        changes: function from the new file to the changed entries of the manifest.

    Raises:
        FileExistsError: another process has already made that generation.
    """
    sha = hashlib.sha256()

    def hashed() -> Iterator[bytes]:
        for part in content:
            sha.update(part)
            yield part

    with new_folder(store / manifest.next_folder) as folder:
        replace_file(folder / name, hashed())
        file = StoredFile(f"{manifest.next_folder}/{name}", sha.hexdigest(), rows)
        entries = dataclasses.asdict(dataclasses.replace(manifest, **changes(file)))
        del entries["generation"]  # the folder's name
        replace_json(folder / MANIFEST, {"format": FORMAT, "version": VERSION, **entries})


def read_manifest(store: Path) -> Manifest:
    """Read the newest generation's manifest.

    Raises:
        TokenStoreError: the folder is missing, not a token store, or damaged.
    """
    if not store.is_dir():
        raise TokenStoreError(f"token store `{store}` does not exist: {REMEDY} or correct the path")
    if not (newest := newest_generation(store)):
        raise TokenStoreError(f"`{store}` is not a token store (no {GENERATION}0001): correct the path")
    path = store / f"{GENERATION}{newest:04d}" / MANIFEST
    wait_until_seen(path.parent)
    try:
        content = json.loads(path.read_text())
        fitting = (content.pop("format"), content.pop("version")) == (FORMAT, VERSION)
        if fitting:
            content["grid"] = tuple(content["grid"])
            content["names"] = StoredFile(*content["names"])
            content["grids"] = tuple(StoredFile(*file) for file in content["grids"])
            content["skipped"] = {int(row): reason for row, reason in content["skipped"].items()}
            return Manifest(**content, generation=newest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TokenStoreError(
            f"token store file `{path}` is damaged ({type(error).__name__}: {error}): {RESTORE}"
        ) from None
    raise TokenStoreError(f"`{store}` is not a token store of version {VERSION}: {REMEDY} at another path")


def newest_generation(store: Path) -> int:
    """Number of the newest generation in a listing of the store, 0 if there is none.

    It lists the folder, because an NFS client that once looked up a missing name remembers for a while that
    it was missing.
    """
    numbers = [path.name[len(GENERATION) :] for path in store.glob(f"{GENERATION}*")]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)
