"""Extend a token store by further images, and merge token stores."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from mapet_mm.structures.store.errors import TokenStoreError
from mapet_mm.structures.store.manifest import Manifest
from mapet_mm.structures.store.names import encode_name
from mapet_mm.structures.store.token_store import IDENTITY, TokenStore, write_names
from mapet_mm.utils.atomic_files import new_folder


def extend_store(path: str | os.PathLike, names: Iterable[str]) -> TokenStore:
    """Append rows for further images, whose tokens are not written yet; the store changes in one step.

    Readers that have the store open keep the generation that they opened.

    Args:
        path: the token store.
        names: image names that it does not have.

    Raises:
        TokenStoreError: there are no names, or a name is there already, is given twice or cannot be stored.
    """
    names = list(names)
    if not names:
        raise TokenStoreError(f"token store `{path}`: no image names given, there is nothing to add")
    while True:
        store = TokenStore.open(path)
        if known := [name for name in names if name in store]:
            raise TokenStoreError(f"token store `{path}` has image {known[0]!r} already: add new images only")
        try:
            write_names(store.path, store._manifest, [*store.names, *names])
        except FileExistsError:  # another process has changed the store: look again
            continue
        return TokenStore.open(path)


def merge_stores(
    path: str | os.PathLike, stores: Sequence[TokenStore], data_root: str | None = None
) -> TokenStore:
    """Merge stores of one tokenizer into a new store, which appears complete or not at all.

    Args:
        path: directory to make.
        stores: the stores to merge, without common images. Rows missing in them are missing in the new store.
        data_root: the new store's, for parts whose images lay in different folders; None: that of all parts.

    Raises:
        TokenStoreError: something is at `path` already, or the stores do not fit together.
    """
    identity = {key: getattr(stores[0], key) for key in IDENTITY}
    for store in stores:
        other = [key for key, value in identity.items() if getattr(store, key) != value]
        if other and (other[0] != "data_root" or data_root is None):
            roots = other[0] == "data_root"
            remedy = "give the merged store's, --data-root" if roots else "they cannot be merged"
            raise TokenStoreError(
                f"token stores `{stores[0].path}` and `{store.path}` have different {other[0]} "
                f"({identity[other[0]]}, {getattr(store, other[0])}): {remedy}"
            )
    _refuse_common_images(stores)
    names = sorted((name for store in stores for name in store.names), key=encode_name)
    manifest = Manifest(**(identity | ({} if data_root is None else {"data_root": data_root})))
    try:
        with new_folder(Path(path)) as folder:
            write_names(folder, manifest, names, Path(path))
            _fill(TokenStore.open(folder), stores)
    except FileExistsError:
        raise TokenStoreError(f"`{path}` exists: choose another path or remove it") from None
    return TokenStore.open(path)


def _refuse_common_images(stores: Sequence[TokenStore]) -> None:
    holders: dict[str, int] = {}
    for number, store in enumerate(stores):
        for name in store.names:
            if (other := holders.setdefault(name, number)) != number:
                raise TokenStoreError(
                    f"token stores `{stores[other].path}` and `{store.path}` both have image {name!r}: leave "
                    "one of them out, or tokenise only the other images for it"
                )


def _fill(merged: TokenStore, stores: Sequence[TokenStore]) -> None:
    for store in stores:
        for rows, grids in store.chunks():
            merged.write([merged.row(store.names[row]) for row in rows.tolist()], grids)
        skipped = {merged.row(name): reason for name, reason in store.skipped.items()}
        merged.write([], np.empty((0, *store.grid), np.int64), skipped)
    if not merged.missing().size:
        merged.seal()
