"""Tokenise images into a token store, in any number of processes, continuing where earlier ones stopped."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from mapet_mm.models.target_generators.tokenizer import Tokenizer
from mapet_mm.structures import TokenStore, TokenStoreError, extend_store
from mapet_mm.structures.store_changes import move_images
from mapet_mm.structures.store_files import PART_ROWS, PENDING, WRITTEN
from mapet_mm.tokenizers.image_groups import GroupLoader, encode_blocks, split
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

    def pending(part: int) -> Int64[np.ndarray, " images"]:
        states = store.states(part)
        is_pending = states != WRITTEN if retry_skipped else states == PENDING
        images = image_of_row[part * PART_ROWS : (part + 1) * PART_ROWS]
        return images[is_pending & (images >= 0)]

    num_written: dict[int, int] = {}
    unreadable: dict[int, str] = {}
    encoded = encode_blocks(
        loader,
        lambda group: tokenizer(group.inputs),
        store.parts,
        pending,
        "extracting tokens",
        FLUSH_SECONDS,
    )
    for part, tokens, reasons in encoded:
        images = image_of_row[part * PART_ROWS : (part + 1) * PART_ROWS]
        # Of all that there is of the part, also of what was flushed before.
        num_written[part], failed = write_tokens(store, part, images, tokens, reasons, on_error)
        unreadable.update(failed)
    if unreadable and on_error != "skip":
        reasons_by_path = {loader.images.path(image): reason for image, reason in unreadable.items()}
        raise UnreadableImagesError(reasons_by_path, f"the tokens of all others are in `{store.path}`")
    skipped_paths = {os.path.join(store.data_root or "", name): why for name, why in store.skipped.items()}
    note = note_skipped(skipped_paths, len(store), store.path / "skipped.txt", max_skipped)
    return Extraction(sum(num_written.values()), store.missing().size, note)


def write_tokens(
    store: TokenStore,
    part: int,
    images: Int64[np.ndarray, " rows"],
    tokens: Mapping[int, Tensor],
    reasons: Mapping[int, str],
    on_error: str,
) -> tuple[int, dict[int, str]]:
    """Write a part's tokens; returns the number of images written, and by image why others were not.

    Args:
        store: receives the tokens.
        part: of the store.
        images: index of the image of each row of the part, -1 if it is not there.
        tokens: by image.
        reasons: by image that could not be decoded.
        on_error: 'skip' records images without tokens in the store.
    """
    first_row = part * PART_ROWS
    row_of = {image: first_row + slot for slot, image in enumerate(images.tolist())}
    rows = np.array([row_of[image] for image in tokens], np.int64)
    grids = grids_of(tokens, store.grid)
    is_finite = (grids >= 0).all(axis=(1, 2))
    failed = dict(reasons)
    for image, finite in zip(tokens, is_finite, strict=True):
        if not finite:
            failed[image] = NOT_FINITE
    skipped = {}
    if on_error == "skip":
        skipped = {row_of[image]: reason for image, reason in failed.items()}
    store.write(rows[is_finite], grids[is_finite], skipped)
    return int(is_finite.sum()), failed


def grids_of(tokens: Mapping[int, Tensor], grid: tuple[int, int]) -> Int[np.ndarray, "images height width"]:
    """The images' tokens as grids; they stay on the device until here, because copying waits for it."""
    if not tokens:
        return np.empty((0, *grid), np.int64)
    return torch.stack(list(tokens.values())).cpu().numpy().reshape(-1, *grid)


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
