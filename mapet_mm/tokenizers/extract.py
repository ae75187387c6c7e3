"""Tokenise images into a token store, in any number of processes, continuing where earlier ones stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from mapet_mm.models.target_generators.base import Tokenizer
from mapet_mm.structures import TokenStore, TokenStoreError, extend_store
from mapet_mm.structures.store_parts import MISSING, PART_ROWS, WRITTEN
from mapet_mm.tokenizers.image_groups import GroupLoader, encode_blocks, split
from mapet_mm.tokenizers.images import NamedImages, UnreadableImagesError, check_on_error, note_left_out
from mapet_mm.utils.identity import explain

# A kill costs the tokens of this time at most.
FLUSH_SECONDS = 60.0
NOT_FINITE = "the network gives NaN or infinity for it"
LARGEST_SKIPPED = 0.05
# A feature between two centroids may be assigned differently on another device; a wrong image, weights file
# or pipeline changes most of an image's tokens.
LARGEST_DIFFERENCE = 0.05


@dataclass
class Extraction:
    """What a run of `extract_tokens` did in this process.

    Args:
        images: images tokenised.
        seconds: time since the first image.
        waited: seconds spent waiting for decoded images.
        others: images of the store that have no tokens yet: they are not in this run's dataset, or another
            process is at work on them.
        left_out: the end of the message, about images that were skipped.
    """

    images: int
    seconds: float
    waited: float
    others: int = 0
    left_out: str = ""

    def __str__(self) -> str:
        rest = self.left_out
        if self.others:
            rest += f"; {self.others} images of the store have no tokens yet"
        if not self.images:
            return "all images had their tokens" + rest
        return (
            f"tokenised {self.images} images in {self.seconds:.0f} s: {self.images / self.seconds:.1f} "
            f"images/s, {self.waited / self.seconds:.0%} of the time waiting for data{rest}"
        )


def open_or_create(
    path: str | os.PathLike, tokenizer: Tokenizer, images: NamedImages, preprocessing: Mapping[str, Any]
) -> tuple[TokenStore, Int64[np.ndarray, " rows"]]:
    """Open the token store at a path; create it if absent, extend it if images are new; locate its images.

    Any number of processes may do this at once.

    Returns:
        The store, and for each of its rows the index of the image in `images`, -1 if it is not there.

    Raises:
        TokenStoreError: the store was made by another tokenizer, for another grid, with other preprocessing
            or from images in another folder.
    """
    names = images.names()
    identity = (tokenizer.grid, tokenizer.vocab_size, tokenizer.digest, images.data_root, preprocessing)
    if not Path(path).exists():
        try:
            TokenStore.create(path, sorted(set(names)), *identity)
        except TokenStoreError:
            if not Path(path).exists():
                raise  # else another process was faster
    store = TokenStore.open(path)
    _check_identity(store, tokenizer, images, preprocessing)
    rows = store.rows(names)
    if new := sorted({name for name, row in zip(names, rows, strict=True) if row < 0}):
        try:
            store = extend_store(path, new)
        except TokenStoreError:
            store = TokenStore.open(path)
            if (store.rows(new) < 0).any():
                raise  # else another process was faster
        rows = store.rows(names)
    place_of_row = np.full(len(store), -1, dtype=np.int64)
    place_of_row[rows[::-1]] = np.arange(len(rows))[::-1]  # the first image of a name
    return store, place_of_row


def _check_identity(
    store: TokenStore, tokenizer: Tokenizer, images: NamedImages, preprocessing: Mapping[str, Any]
) -> None:
    store.require_tokenizer(tokenizer.digest, "the config's tokenizer")
    found = {"grid": tokenizer.grid, "preprocessing": preprocessing}
    if changed := explain({"grid": store.grid, "preprocessing": store.preprocessing}, found):
        raise TokenStoreError(
            f"token store `{store.path}` was made with other settings ({changed}): choose another one"
        )
    if os.path.realpath(store.data_root or images.data_root) != os.path.realpath(images.data_root):
        raise TokenStoreError(
            f"token store `{store.path}` is of images in `{store.data_root}`, the config's are in "
            f"`{images.data_root}`: choose another `token_store`, or, if this is the same folder "
            "moved, leave a link to it in its old place"
        )


def extract_tokens(
    tokenizer: Tokenizer,
    loader: GroupLoader,
    store: TokenStore,
    place_of_row: Int64[np.ndarray, " rows"],
    on_error: str = "raise",
    retry_skipped: bool = False,
    max_skipped: float = LARGEST_SKIPPED,
) -> Extraction:
    """Write the token grids missing in the store.

    Any number of processes and machines may do this at once: each takes parts of the store by its rank, and
    at the end what others have left.

    Args:
        tokenizer: computes the tokens on its own device.
        loader: loads the images.
        store: receives the tokens; all processes must see it.
        place_of_row: index of each row's image in the loader's dataset, -1 if it is not there.
        on_error: 'raise' leaves images missing that cannot be decoded, or for which the network gives NaN or
            infinity, and raises at the end; 'skip' records them in the store.
        retry_skipped: try the images that were skipped again.
        max_skipped: largest share of the images that may be skipped.

    Raises:
        UnreadableImagesError: after the tokens of all other images are written.
        UserError: more than `max_skipped` of the images were skipped, or the storage gives errors.
    """
    check_on_error(on_error)

    def lacking(part: int) -> Int64[np.ndarray, " rows"]:
        states, places = store.states(part), place_of_row[part * PART_ROWS : (part + 1) * PART_ROWS]
        untried = states != WRITTEN if retry_skipped else states == MISSING
        return places[untried & (places >= 0)]

    total = sum(len(lacking(part)) for part in range(store.parts))
    written, unreadable, start = {}, {}, time.perf_counter()
    # Results stay on the device until they are written, because copying waits for it.
    blocks = encode_blocks(
        loader,
        lambda group: tokenizer(group.inputs),
        store.parts,
        lacking,
        total,
        "extracting tokens",
        FLUSH_SECONDS,
    )
    for part, results, reasons in blocks:
        first = part * PART_ROWS
        row_of = {
            place: first + row for row, place in enumerate(place_of_row[first : first + PART_ROWS].tolist())
        }
        grids = _grids(results, store.grid)
        finite = (grids >= 0).all(axis=(1, 2))
        rows = np.array([row_of[place] for place in results], np.int64)
        reasons |= {place: NOT_FINITE for place, good in zip(results, finite, strict=True) if not good}
        unreadable |= reasons
        skipped = {row_of[place]: why for place, why in reasons.items()} if on_error == "skip" else {}
        store.write(rows[finite], grids[finite], skipped)
        written[part] = int(finite.sum())
    seconds = time.perf_counter() - start
    paths = {loader.images.path(place): reason for place, reason in unreadable.items()}
    if paths and on_error == "raise":
        raise UnreadableImagesError(paths, f"the tokens of all others are in `{store.path}`")
    skipped = {os.path.join(store.data_root or "", name): why for name, why in store.skipped.items()}
    left_out = note_left_out(skipped, len(store), store.path / "skipped.txt", max_skipped)
    return Extraction(sum(written.values()), seconds, loader.waited, store.missing().size, left_out)


def _grids(results: Mapping[int, Tensor], grid: tuple[int, int]) -> Int64[np.ndarray, "images height width"]:
    """Results on the host."""
    if not results:
        return np.empty((0, *grid), np.int64)
    return torch.stack(list(results.values())).cpu().numpy().reshape(-1, *grid)


class Verification(NamedTuple):
    """Numbers of images tokenised again, of their tokens, and of tokens that differ from the store's."""

    images: int
    tokens: int
    different: int

    def __str__(self) -> str:
        return f"{self.different} of {self.tokens} tokens of {self.images} images differ from fresh ones"


def verify_store(
    tokenizer: Tokenizer, loader: GroupLoader, store: TokenStore, count: int = 256, seed: int = 0
) -> Verification:
    """Check a store's files against their digests, and `count` random images against newly computed tokens.

    Raises:
        TokenStoreError: another tokenizer made the store, a file has changed, or more than 5 % of an image's
            tokens differ (fewer are ties that devices break differently).
    """
    store.require_tokenizer(tokenizer.digest, "the config's tokenizer")
    store.verify()
    names = loader.images.names()
    rows, written = store.rows(names), store.written()
    there = [place for place, row in enumerate(rows) if row >= 0 and written[row]]
    drawn = sorted(np.random.default_rng(seed).permutation(there)[:count].tolist())
    different, tokens = 0, 0
    for group in loader.load((0, places) for places in split(drawn, loader.group_size)):
        for place, reason in group.unreadable.items():
            raise TokenStoreError(f"image `{loader.images.path(place)}` could not be decoded ({reason})")
        for place, fresh in zip(group.places, tokenizer(group.inputs).cpu().numpy(), strict=False):
            wrong = int((store[names[place]].ravel() != fresh).sum())
            if wrong > LARGEST_DIFFERENCE * fresh.size:
                raise TokenStoreError(
                    f"token store `{store.path}`: {wrong} of {fresh.size} tokens of image "
                    f"`{loader.images.path(place)}` differ from fresh ones: the image or the pipeline has "
                    "changed since; give the image another name, so that it counts as new, or extract into "
                    "another store"
                )
            different, tokens = different + wrong, tokens + fresh.size
    return Verification(len(drawn), tokens, different)
