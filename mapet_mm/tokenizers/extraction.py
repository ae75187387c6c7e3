"""Tokenise images into a token store, continuing where an earlier run stopped."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from torch import nn
from tqdm import tqdm

from mapet_mm.tokenizers.frozen import FrozenTokenizer
from mapet_mm.tokenizers.images import NamedImages, UnreadableImagesError, image_loader, normalise
from mapet_mm.tokenizers.kclip import KCLIP
from mapet_mm.tokenizers.token_store import TokenStore, TokenStoreError

Tokenizer = KCLIP | FrozenTokenizer


def open_or_create(path: str | os.PathLike, tokenizer: Tokenizer, images: NamedImages) -> TokenStore:
    """The token store at a path, made if absent.

    Raises:
        TokenStoreError: it was made by another tokenizer, for another grid, or without some of the images.
    """
    if not Path(path).exists():
        return TokenStore.create(
            path, images.names, tokenizer.grid, tokenizer.vocab_size, tokenizer.digest, images.data_root
        )
    store = TokenStore.open(path)
    store.require_tokenizer(tokenizer.digest, "the config's tokenizer")
    if store.grid != tokenizer.grid:
        raise TokenStoreError(
            f"token store `{path}` has grids of {store.grid}, the tokenizer gives {tokenizer.grid}: choose "
            "another `token_store`"
        )
    return store


def extract_tokens(
    tokenizer: Tokenizer,
    preprocessor: nn.Module,
    images: NamedImages,
    store: TokenStore,
    batch_size: int = 32,
    num_workers: int = 2,
) -> int:
    """Write the token grids of the images that the store misses; only those are read.

    Returns:
        The number of images tokenised now.

    Raises:
        TokenStoreError: the store has no row for some of the images.
        UnreadableImagesError: after the tokens of all other images are written.
    """
    rows = _rows(store, images)
    todo = np.flatnonzero(~store.written()[rows])
    batches = [todo[start : start + batch_size] for start in range(0, len(todo), batch_size)]
    unreadable = []
    with tqdm(total=len(todo), desc="extracting tokens", unit="image") as bar:
        for batch in image_loader(images, batches, num_workers, pin_memory=False):
            unreadable += [(images.path(position), reason) for position, reason in batch.unreadable]
            if batch.images is not None:
                tokens = tokenizer(normalise(preprocessor, batch.images)).cpu().numpy()
                store.write(rows[batch.positions], tokens.reshape(-1, *store.grid))
            bar.update(len(batch.positions) + len(batch.unreadable))
    if unreadable:
        raise UnreadableImagesError(unreadable, f"the tokens of all others are in `{store.path}`")
    return len(todo)


def _rows(store: TokenStore, images: NamedImages) -> np.ndarray:
    rows = [store.row(name) for name in images.names]
    unknown = [name for name, row in zip(images.names, rows, strict=True) if row is None]
    if unknown:
        raise TokenStoreError(
            f"token store `{store.path}` was made without {len(unknown)} of the config's images, the first "
            f"`{unknown[0]}`: choose another `token_store`, or remove that one to extract all again"
        )
    return np.array(rows, dtype=np.int64)
