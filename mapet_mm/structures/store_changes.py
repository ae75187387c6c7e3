"""Token stores made of others: extended by new images, or merged."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mapet_mm.structures.manifest import MANIFEST, new_store_folder, write_names
from mapet_mm.structures.store_files import TokenStoreError
from mapet_mm.structures.token_store import TokenStore
from mapet_mm.utils.atomic_files import replace_json
from mapet_mm.utils.identity import explain


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
            for rows, grids in tqdm(store.chunks(), f"merging {store.path}", store.parts, unit="part"):
                merged.write(merged_rows[rows], grids)
            skipped = store.skipped
            skipped_rows = merged.rows(skipped).tolist()
            no_grids = np.empty((0, *store.grid), store.dtype)
            merged.write([], no_grids, dict(zip(skipped_rows, skipped.values(), strict=True)))
    return TokenStore.open(path)
