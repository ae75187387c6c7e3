"""Extend a token store by further images, and merge token stores."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from mapet_mm.structures.token_store import TokenStore, TokenStoreError, new_store, write_names

IDENTITY = ("grid", "vocab_size", "tokenizer", "preprocessing", "data_root")


def extend_store(path: str | os.PathLike, names: Iterable[str]) -> TokenStore:
    """Append rows for further images, whose tokens are not written yet; the store changes in one step.

    Readers that have the store open keep the images that they know. If two processes add different images at
    the same moment, those of one of them count.

    Args:
        path: the token store.
        names: image names that it does not have.

    Raises:
        TokenStoreError: there are no names, or a name is there already or is given twice.
    """
    store, names = TokenStore.open(path), list(names)
    if not names:
        raise TokenStoreError(f"token store `{path}`: no image names given, there is nothing to add")
    if known := [name for name, row in zip(names, store.rows(names), strict=True) if row >= 0]:
        raise TokenStoreError(f"token store `{path}` has image {known[0]!r} already: add new images only")
    write_names(store.path, store.manifest, [*store.names, *names])
    return TokenStore.open(path)


def merge_stores(
    path: str | os.PathLike, stores: Sequence[TokenStore], data_root: str | None = None
) -> TokenStore:
    """Merge stores of one tokenizer into a new store, which appears complete or not at all.

    Args:
        path: directory to make.
        stores: the stores to merge, without common images. Rows missing in them are missing in the new store.
        data_root: the new store's, where the images lay in different folders; None: that of all stores.

    Raises:
        TokenStoreError: something is at `path` already, the stores do not fit together, or one is damaged.
    """
    identity = {key: getattr(stores[0], key) for key in IDENTITY}
    for store in stores:
        for key, value in identity.items():
            if getattr(store, key) != value and (key != "data_root" or data_root is None):
                raise TokenStoreError(
                    f"token stores `{stores[0].path}` and `{store.path}` have different {key} ({value}, "
                    f"{getattr(store, key)})"
                    + (": give the merged store's, --data-root" if key == "data_root" else "")
                )
    identity["data_root"] = data_root or identity["data_root"]
    names = sorted(name for store in stores for name in store.names)
    with new_store(Path(path), names, identity) as merged:
        for store in stores:
            for rows, grids in store.chunks():
                merged.write(merged.rows(store.names[row] for row in rows.tolist()), grids)
            skipped = store.skipped
            rows = merged.rows(skipped).tolist()
            nothing = np.empty((0, *store.grid), store.dtype)
            merged.write([], nothing, dict(zip(rows, skipped.values(), strict=True)))
    return TokenStore.open(path)
