"""Tokenise images into a token store, in any number of processes, continuing where earlier ones stopped."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64

from mapet_mm.models.target_generators.tokenizer import Tokenizer
from mapet_mm.structures import TokenStore, TokenStoreError, extend_store
from mapet_mm.structures.store_files import MISSING, PART_ROWS, WRITTEN
from mapet_mm.tokenizers.image_groups import GroupLoader, encode_blocks, split
from mapet_mm.tokenizers.images import LARGEST_SKIPPED, NamedImages, UnreadableImagesError, note_left_out
from mapet_mm.utils.identity import explain

# A kill costs the tokens of this time at most.
FLUSH_SECONDS = 60.0
NOT_FINITE = "the network gives NaN or infinity for it"
# A feature between two centroids may be assigned differently on another device; a wrong image, weights file
# or pipeline changes most of an image's tokens.
LARGEST_DIFFERENCE = 0.05


class Extraction(NamedTuple):
    """Images tokenised by this process, others that have no tokens, and a note on those that were left out.

    The others are not in this run's dataset, or another process is at work on them.
    """

    images: int
    others: int
    left_out: str

    def __str__(self) -> str:
        done = f"tokenised {self.images} images" if self.images else "all images had their tokens"
        others = f"; {self.others} images of the store have no tokens yet" if self.others else ""
        return done + self.left_out + others


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
    identity = (tokenizer.grid, tokenizer.vocab_size, tokenizer.digest, images.data_root, preprocessing)
    if not Path(path).exists():
        try:
            TokenStore.create(path, sorted(set(names)), *identity)
        except TokenStoreError:
            if not Path(path).exists():
                raise  # else another process was faster
    store = TokenStore.open(path)
    store.require_tokenizer(tokenizer.digest, "the config's tokenizer")
    root = os.path.realpath(images.data_root)
    before = (store.grid, store.preprocessing, os.path.realpath(store.data_root or root))
    keys = ("grid", "preprocessing", "data_root")
    found = dict(zip(keys, (tokenizer.grid, preprocessing, root), strict=True))
    if changed := explain(dict(zip(keys, before, strict=True)), found):
        raise TokenStoreError(
            f"token store `{store.path}` was made with other settings ({changed}): choose another "
            "`token_store`; if the folder of images was moved, leave a link to it in its old place"
        )
    rows = store.rows(names)
    if new := sorted({name for name, row in zip(names, rows, strict=True) if row < 0}):
        try:
            extend_store(path, new)
        except TokenStoreError:
            if (TokenStore.open(path).rows(new) < 0).any():
                raise  # else another process was faster
        store = TokenStore.open(path)
        rows = store.rows(names)
    place_of_row = np.full(len(store), -1, dtype=np.int64)
    place_of_row[rows[::-1]] = np.arange(len(rows))[::-1]  # the first image of a name
    return store, place_of_row


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

    def lacking(part: int) -> Int64[np.ndarray, " rows"]:
        states, places = store.states(part), place_of_row[part * PART_ROWS : (part + 1) * PART_ROWS]
        untried = states != WRITTEN if retry_skipped else states == MISSING
        return places[untried & (places >= 0)]

    written, unreadable = {}, {}
    what = (store.parts, lacking, "extracting tokens", FLUSH_SECONDS)
    for part, results, reasons in encode_blocks(loader, lambda group: tokenizer(group.inputs), *what):
        first = part * PART_ROWS
        places = place_of_row[first : first + PART_ROWS].tolist()
        row_of = {place: first + row for row, place in enumerate(places)}
        grids = np.empty((0, *store.grid), np.int64)
        if results:  # they stay on the device until here, because copying waits for it
            grids = torch.stack(list(results.values())).cpu().numpy().reshape(-1, *store.grid)
        finite = (grids >= 0).all(axis=(1, 2))
        rows = np.array([row_of[place] for place in results], np.int64)
        reasons |= {place: NOT_FINITE for place, good in zip(results, finite, strict=True) if not good}
        unreadable |= reasons
        skipped = {row_of[place]: why for place, why in reasons.items()} if on_error == "skip" else {}
        store.write(rows[finite], grids[finite], skipped)
        written[part] = int(finite.sum())
    if unreadable and on_error != "skip":
        paths = {loader.images.path(place): reason for place, reason in unreadable.items()}
        raise UnreadableImagesError(paths, f"the tokens of all others are in `{store.path}`")
    skipped = {os.path.join(store.data_root or "", name): why for name, why in store.skipped.items()}
    left_out = note_left_out(skipped, len(store), store.path / "skipped.txt", max_skipped)
    return Extraction(sum(written.values()), store.missing().size, left_out)


def verify_store(tokenizer: Tokenizer, loader: GroupLoader, store: TokenStore, count: int = 256) -> str:
    """Check a store's files, and `count` random images against newly computed tokens; says how many differ.

    Raises:
        TokenStoreError: another tokenizer made the store, a file has changed, or more than 5 % of an image's
            tokens differ (fewer are ties that devices break differently).
    """
    store.require_tokenizer(tokenizer.digest, "the config's tokenizer")
    store.verify()
    names = loader.images.names()
    rows, written = store.rows(names), store.written()
    there = [place for place, row in enumerate(rows) if row >= 0 and written[row]]
    drawn = sorted(np.random.default_rng(0).permutation(there)[:count].tolist())
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
    return f"{different} of {tokens} tokens of {len(drawn)} images differ from fresh ones"
