"""Tokenise images into a token store, in any number of processes, continuing where earlier ones stopped."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from mapet_mm.models.target_generators.tokenizer import Tokenizer
from mapet_mm.structures import TokenStore, TokenStoreError, extend_store
from mapet_mm.structures.token_store import move_images
from mapet_mm.tokenizers.fill import GroupLoader, fill, split
from mapet_mm.tokenizers.images import LARGEST_SKIPPED, NamedImages, UnreadableImagesError, note_skipped

# A kill costs the tokens of this time at most.
FLUSH_SECONDS = 60.0
NOT_FINITE = "the network gives NaN or infinity for it"
# A feature between two centroids may be assigned differently on another device; a wrong image, weights file
# or pipeline changes most of an image's tokens.
LARGEST_DIFFERENCE = 0.05


@dataclass(frozen=True)
class Extraction:
    """Result of a run.

    Attributes:
        images: number of images tokenised here.
        pending: number of images of the store still without tokens: in no dataset of this run, or being done
            elsewhere.
        note: on the images that were skipped; empty if there are none.
    """

    images: int
    pending: int
    note: str

    def __str__(self) -> str:
        done = f"tokenised {self.images} images" if self.images else "all images had their tokens"
        pending = f"; {self.pending} images of the store have no tokens yet" if self.pending else ""
        return done + self.note + pending


def open_or_create(
    path: str | os.PathLike, tokenizer: Tokenizer, images: NamedImages, preprocessing: Mapping[str, Any]
) -> tuple[TokenStore, Int64[np.ndarray, " rows"]]:
    """Open the token store at a path; create it if absent, extend it if images are new; locate its images.

    Any number of processes may do this at once. Returns the store, and for each of its rows the index of the
    image in `images`, -1 if it is not there.

    Raises:
        TokenStoreError: the store is of another tokenizer, grid, preprocessing or folder of images.
    """
    names = images.names()
    if not Path(path).exists():
        create_store(path, tokenizer, names, images.data_root, preprocessing)
    store = TokenStore.open(path)
    store.require_tokenizer(tokenizer.digest, f"the config's tokenizer (in {tokenizer.precision})")
    store.require_settings(tokenizer.grid, preprocessing, images.data_root)
    if store.data_root and os.path.realpath(store.data_root) != os.path.realpath(images.data_root):
        store = move_images(path, images.data_root)
    rows = store.rows(names)
    if (rows < 0).any():
        store = add_images(store, [name for name, row in zip(names, rows, strict=True) if row < 0])
        rows = store.rows(names)
    image_of_row = np.full(len(store), -1, dtype=np.int64)
    found_rows, first_images = np.unique(rows, return_index=True)  # of equal names, the first image counts
    image_of_row[found_rows] = first_images
    return store, image_of_row


def create_store(
    path: str | os.PathLike,
    tokenizer: Tokenizer,
    names: Sequence[str],
    data_root: str,
    preprocessing: Mapping[str, Any],
) -> None:
    """Create a token store for a tokenizer's images, unless another process is faster."""
    try:
        TokenStore.create(
            path,
            sorted(set(names)),
            tokenizer.grid,
            tokenizer.vocab_size,
            tokenizer.digest,
            data_root,
            preprocessing,
        )
    except TokenStoreError:
        if not Path(path).exists():
            raise


def add_images(store: TokenStore, names: Sequence[str]) -> TokenStore:
    """Extend a store by images that it lacks, unless another process is faster."""
    try:
        return extend_store(store.path, sorted(set(names)))
    except TokenStoreError:
        store = TokenStore.open(store.path)
        if (store.rows(names) < 0).any():
            raise
        return store


def extract_tokens(
    tokenizer: Tokenizer,
    loader: GroupLoader,
    store: TokenStore,
    image_of_row: Int64[np.ndarray, " rows"],
    on_error: str = "raise",
    retry_skipped: bool = False,
    max_skipped: float = LARGEST_SKIPPED,
) -> Extraction:
    """Write the token grids that are pending in the store.

    Any number of processes and machines may do this at once: each takes parts of the store by its rank, and
    at the end what others have left.

    Args:
        tokenizer: computes the tokens on its own device.
        loader: loads the images.
        store: receives the tokens; all processes must see it.
        image_of_row: index of each row's image in the loader's dataset, -1 if it is not there.
        on_error: 'raise' leaves images pending that cannot be decoded, or for which the network gives NaN or
            infinity, and raises at the end; 'skip' records them in the store.
        retry_skipped: try the images again that were skipped; without it, only if they are too many.
        max_skipped: largest share of the images that may be skipped.

    Raises:
        UnreadableImagesError: after the tokens of all other images are written.
        UserError: more than `max_skipped` of the images were skipped, or the storage gives errors.
    """
    retry_skipped = retry_skipped or len(store.skipped) > max_skipped * len(store)
    num_written, unreadable = fill(
        store.parts,
        image_of_row,
        loader,
        lambda group: tokenizer(group.inputs),
        "extracting tokens",
        lambda tokens: NOT_FINITE if (tokens < 0).any() else None,
        on_error == "skip",
        retry_skipped,
        FLUSH_SECONDS,
    )
    if unreadable and on_error != "skip":
        reasons_by_path = {loader.images.path(image): reason for image, reason in unreadable.items()}
        raise UnreadableImagesError(reasons_by_path, f"the tokens of all others are in `{store.path}`")
    skipped_paths = {os.path.join(store.data_root or "", name): why for name, why in store.skipped.items()}
    note = note_skipped(skipped_paths, len(store), store.path / "skipped.txt", max_skipped)
    return Extraction(num_written, store.missing().size, note)


def verify_store(tokenizer: Tokenizer, loader: GroupLoader, store: TokenStore, count: int = 256) -> str:
    """Check a store's files, and `count` random images against newly computed tokens; says how many differ.

    Raises:
        TokenStoreError: another tokenizer made the store, a file has changed, or more than 5 % of an image's
            tokens differ (fewer are ties that devices break differently).
    """
    store.require_tokenizer(tokenizer.digest, f"the config's tokenizer (in {tokenizer.precision})")
    store.verify()
    names = loader.images.names()
    rows = store.rows(names)
    written = store.written()
    with_tokens = [image for image, row in enumerate(rows) if row >= 0 and written[row]]
    drawn = sorted(np.random.default_rng(0).permutation(with_tokens)[:count].tolist())
    num_different = 0
    num_tokens = 0
    for group in loader.load((0, images) for images in split(drawn, loader.group_size)):
        if group.reasons:
            image, reason = next(iter(group.reasons.items()))
            raise TokenStoreError(f"image `{loader.images.path(image)}` could not be decoded ({reason})")
        for image, fresh in zip(group.indices, tokenizer(group.inputs).cpu().numpy(), strict=False):
            different = int((store[names[image]].ravel() != fresh).sum())
            if different > LARGEST_DIFFERENCE * fresh.size:
                raise TokenStoreError(
                    f"token store `{store.path}`: {different} of {fresh.size} tokens of image "
                    f"`{loader.images.path(image)}` differ from fresh ones: the image or the pipeline has "
                    "changed since; give the image another name, so that it counts as new, or extract into "
                    "another store"
                )
            num_different += different
            num_tokens += fresh.size
    return f"{num_different} of {num_tokens} tokens of {len(drawn)} images differ from fresh ones"
