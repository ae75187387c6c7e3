"""Extend a token store by further images, and merge token stores."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mapet_mm.structures.token_store import TokenStore, TokenStoreError, new_store, write_names
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


def merge_stores(path: str | os.PathLike, stores: Sequence[TokenStore]) -> TokenStore:
    """Merge stores without common images into a new store, which appears complete or not at all.

    Rows missing in them are missing in the new store.

    Raises:
        TokenStoreError: something is at `path` already, the stores do not fit together, or one is damaged.
    """
    for store in stores:
        if changed := explain(stores[0].identity, store.identity):
            raise TokenStoreError(
                f"token stores `{stores[0].path}` and `{store.path}` do not fit together ({changed})"
            )
    names = sorted(name for store in stores for name in store.names)
    with new_store(Path(path), names, stores[0].identity) as merged:
        for store in stores:
            places = merged.rows(store.names)
            for rows, grids in tqdm(store.chunks(), f"merging {store.path}", store.parts, unit="part"):
                merged.write(places[rows], grids)
            rows, reasons = merged.rows(store.skipped).tolist(), store.skipped.values()
            nothing = np.empty((0, *store.grid), store.dtype)
            merged.write([], nothing, dict(zip(rows, reasons, strict=True)))
    return TokenStore.open(path)
