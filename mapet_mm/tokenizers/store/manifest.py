"""What is in a token store: a manifest in each of its generations, of which the newest counts.

A generation is a folder that appears whole and never changes. Whoever opened an older one goes on with it,
and of two processes that would make the same one, the second finds it there and starts over.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mapet_mm.file_replacement import replace_file, replace_json, wait_until_seen
from mapet_mm.tokenizers.store.errors import REMEDY, TokenStoreError
from mapet_mm.tokenizers.store.names import names_file

FORMAT, VERSION = "mapet_mm.token_store", 2
MANIFEST, NAMES, GENERATION = "manifest.json", "names.safetensors", "generation-"


@dataclass(frozen=True)
class Part:
    """Images that came into the store together, with rows of their own behind those of the parts before.

    Args:
        names: file of the names, relative to the store.
        names_sha256: its checksum; the part's identity, which blocks refer to.
        rows: how many names.
        grids: file of the grids once the part is sealed.
        grids_sha256: its checksum.
        skipped: images that could not be decoded, by row, with the reason; known once the part is sealed.
    """

    names: str
    names_sha256: str
    rows: int
    grids: str | None = None
    grids_sha256: str | None = None
    skipped: Mapping[int, str] = field(default_factory=dict)

    def sealed(self, grids: str, grids_sha256: str, skipped: Mapping[int, str]) -> Part:
        """The same with its grids in a file."""
        return dataclasses.replace(self, grids=grids, grids_sha256=grids_sha256, skipped=dict(skipped))


@dataclass(frozen=True)
class Manifest:
    """A generation of a store; the arguments are those of `TokenStore.create`, and its parts."""

    grid: tuple[int, int]
    vocab_size: int
    tokenizer: str
    data_root: str | None
    preprocessing: Mapping[str, Any] | None
    parts: tuple[Part, ...]
    generation: int = 1

    @property
    def dtype(self) -> str:
        """Type of the ids."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    @property
    def folder(self) -> str:
        """Where this generation is, relative to the store."""
        return f"{GENERATION}{self.generation:04d}"

    def with_parts(self, parts: Iterable[Part]) -> Manifest:
        """The same with other parts."""
        return dataclasses.replace(self, parts=tuple(parts))

    def following(self) -> Manifest:
        """The next generation, nothing in it changed yet."""
        return dataclasses.replace(self, generation=self.generation + 1)


def write_names(folder: Path, manifest_folder: str, names: Iterable[str]) -> Part:
    """Write the names of a new part into a generation that is being made.

    Raises:
        ValueError: names that cannot be rows.
    """
    names = list(names)
    content = names_file(names)
    replace_file(folder / NAMES, content)
    return Part(f"{manifest_folder}/{NAMES}", hashlib.sha256(content).hexdigest(), len(names))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a generation that is being made."""
    content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(manifest)}
    del content["generation"]  # the folder's name
    replace_json(folder / MANIFEST, content)


def read_manifest(store: Path) -> Manifest:
    """The newest generation's.

    Raises:
        TokenStoreError: the folder is missing, no token store, or damaged.
    """
    if not store.is_dir():
        raise TokenStoreError(f"token store `{store}` does not exist: {REMEDY} or correct the path")
    if not (newest := newest_generation(store)):
        raise TokenStoreError(f"`{store}` is not a token store (no {GENERATION}0001): correct the path")
    path = store / f"{GENERATION}{newest:04d}" / MANIFEST
    wait_until_seen(path.parent)
    try:
        content = json.loads(path.read_text())
        if (content.pop("format"), content.pop("version")) != (FORMAT, VERSION):
            raise TokenStoreError(
                f"`{store}` is not a token store of version {VERSION}: {REMEDY} at another path"
            )
        parts = tuple(_part(entries) for entries in content.pop("parts"))
        content["grid"] = tuple(content["grid"])
        return Manifest(**content, parts=parts, generation=newest)
    except TokenStoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TokenStoreError(
            f"token store file `{path}` is damaged ({type(error).__name__}: {error}): restore it from a "
            "copy, or extract into another token store with tools/extract_tokens.py"
        ) from None


def newest_generation(store: Path) -> int:
    """Number of the newest generation that a listing of the store shows, 0 if none.

    A listing, because a machine that asks for a name over NFS remembers for a while that it was not there.
    """
    numbers = [path.name[len(GENERATION) :] for path in store.glob(f"{GENERATION}*")]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _part(entries: dict[str, Any]) -> Part:
    skipped = {int(row): reason for row, reason in entries.pop("skipped").items()}
    return Part(**entries, skipped=skipped)
