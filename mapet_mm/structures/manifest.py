"""The manifest of a token store, and the folder that it makes a store: both appear in one step."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from mapet_mm.structures.image_files import file_digests
from mapet_mm.structures.names import names_file
from mapet_mm.structures.tensor_file import TokenStoreError
from mapet_mm.utils.atomic_files import new_folder, replace_file, replace_json

STORE_FORMAT = {"format": "mapet_mm.token_store", "version": 4}
MANIFEST = "manifest.json"
EXTRACT = "run `mapet-mm extract-tokens` with the tokenizer's config"


def read_manifest(store: Path) -> dict[str, Any]:
    """The manifest of a store; TokenStoreError if there is none, or one of another version."""
    path = store / MANIFEST
    if not path.exists():
        how = f"is not a token store (it has no {MANIFEST})" if store.is_dir() else "does not exist"
        raise TokenStoreError(f"token store `{store}` {how}: {EXTRACT} or correct the path")
    manifest = json.loads(path.read_text())
    if not STORE_FORMAT.items() <= manifest.items():
        raise TokenStoreError(
            f"`{store}` is not a token store of version {STORE_FORMAT['version']}: {EXTRACT} at another path"
        )
    return manifest


@contextmanager
def new_store_folder(path: Path, names: Sequence[str], identity: Mapping[str, Any]) -> Iterator[Path]:
    """The folder of a store with names and no tokens, which appears at `path` when the block ends."""
    try:
        with new_folder(path) as folder:
            (folder / "parts").mkdir()
            manifest = {**STORE_FORMAT, "id": uuid.uuid4().hex[:12], **identity}
            files = file_digests(identity["data_root"], names)
            if files:
                manifest["files"] = files
            write_names(folder, manifest, names)
            yield folder
    except FileExistsError:
        raise TokenStoreError(
            f"`{path}` exists: choose another path or remove it; `mapet-mm extract-tokens` continues a store"
        ) from None


def write_names(store: Path, manifest: Mapping[str, Any], names: Sequence[str]) -> None:
    """Write a file of names, and the manifest that counts it."""
    content = names_file(names)
    digest = sha256(content).hexdigest()
    file = f"names-{manifest['id']}-{digest[:12]}.safetensors"
    replace_file(store / file, content)
    replace_json(store / MANIFEST, {**manifest, "names": file, "names_sha256": digest, "rows": len(names)})
