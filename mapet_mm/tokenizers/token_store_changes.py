"""Token stores made of token stores: extended by further images, or merged."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mapet_mm.tokenizers import token_files as files
from mapet_mm.tokenizers.token_names import ORDER_FILE, encode_name
from mapet_mm.tokenizers.token_store import TokenStore, TokenStoreError

ALIKE = ("grid", "vocab_size", "tokenizer", "data_root")


def extend_store(path: str | os.PathLike, names: Iterable[str]) -> TokenStore:
    """Add rows for further images, not written yet; the store changes in one step.

    Rows of a store in byte order stay so, which moves rows; in other stores the new ones come last. Who has
    the store open goes on reading the old one.

    Args:
        path: the token store.
        names: image names that it does not have.

    Raises:
        TokenStoreError: a name is there already, is given twice or cannot be stored.
    """
    store = TokenStore.open(path)
    old, old_names = files.read_meta(store.path), list(store.names)
    everything = [*old_names, *names]
    if ORDER_FILE not in old["bytes"]:
        everything.sort(key=encode_name)
    name_files = files.index(store.path, everything)
    meta = _meta_like(old, name_files, everything)
    meta["generation"] = old.get("generation", 0) + 1
    files.write_files(store.path, meta, name_files)
    files.copy_rows(store.path, store.path, meta, _rows(old_names, everything))
    files.write_meta(store.path, meta)
    files.remove_files(store.path, old)
    return TokenStore.open(path)


def merge_stores(path: str | os.PathLike, stores: Sequence[TokenStore]) -> TokenStore:
    """Make one store of several of the same tokenizer and data root; it appears complete or not at all.

    Args:
        path: directory to make.
        stores: the stores to merge; no image in two of them. Rows that they miss, the new one misses too.

    Raises:
        TokenStoreError: something is at `path` already, or the stores do not fit together.
    """
    path = Path(path)
    if path.exists():
        raise TokenStoreError(f"`{path}` exists: choose another path or remove it")
    metas = [files.read_meta(store.path) for store in stores]
    for store, meta in zip(stores, metas, strict=True):
        if other := [key for key in ALIKE if meta[key] != metas[0][key]]:
            raise TokenStoreError(
                f"token stores `{stores[0].path}` and `{store.path}` have different {other[0]} "
                f"({metas[0][other[0]]}, {meta[other[0]]}): they cannot be merged"
            )
    names = sorted((name for store in stores for name in store.names), key=encode_name)
    name_files = files.index(path, names)
    meta = _meta_like(metas[0], name_files, names)
    partial = files.make_folder(path, meta, name_files)
    for store in stores:
        files.copy_rows(store.path, partial, meta, _rows(store.names, names))
    os.rename(partial, path)
    merged = TokenStore.open(path)
    if not merged.missing().size:
        merged.seal()
    return merged


def _meta_like(meta: dict[str, Any], name_files: dict[str, bytes], names: Sequence[str]) -> dict[str, Any]:
    sizes = {name: len(content) for name, content in name_files.items()}
    kept = {key: value for key, value in meta.items() if key not in ("sha256", "generation")}
    return {**kept, "rows": len(names), "bytes": sizes}


def _rows(names: Iterable[str], everything: Sequence[str]) -> np.ndarray:
    row_of_name = {name: row for row, name in enumerate(everything)}
    return np.array([row_of_name[name] for name in names], dtype=np.int64)
