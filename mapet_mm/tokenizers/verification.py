"""Check a token store: its files against their checksums, and some images against newly computed tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mapet_mm.tokenizers.base import Tokenizer
from mapet_mm.tokenizers.image_groups import GroupLoader, split
from mapet_mm.tokenizers.store import TokenStore, TokenStoreError

# A feature between two centroids may be assigned differently on another device; a wrong image, weights file
# or pipeline changes most of an image's tokens.
LARGEST_SHARE = 0.05


class Verification(NamedTuple):
    """Numbers of images tokenised again, of their tokens, and of tokens that differ from the store's."""

    images: int
    tokens: int
    different: int

    def __str__(self) -> str:
        return f"{self.different} of {self.tokens} tokens of {self.images} images differ from fresh ones"


def verify_store(
    tokenizer: Tokenizer,
    loader: GroupLoader,
    store: TokenStore,
    count: int = 256,
    seed: int = 0,
) -> Verification:
    """Check a sealed store against its checksums, and `count` random images against newly computed tokens.

    Raises:
        TokenStoreError: another tokenizer made the store, it is not sealed, a file has changed, or more than
            5 % of an image's tokens differ (fewer are ties that devices break differently).
    """
    store.require_tokenizer(tokenizer.digest, "the config's tokenizer")
    store.verify_checksums()
    skipped = store.skipped
    images = loader.images
    places = [place for name, place in images.places("reading names").items() if name not in skipped]
    drawn = np.random.default_rng(seed).choice(places, size=min(count, len(places)), replace=False)
    groups = ((0, group) for group in split(np.sort(drawn).tolist(), loader.group_size))
    different, tokens = 0, 0
    for group in loader.load(groups):
        for place, reason in group.unreadable.items():
            raise TokenStoreError(f"image `{images.path(place)}` could not be decoded ({reason})")
        fresh = tokenizer(group.inputs).cpu().numpy()
        for place, grid in zip(group.places, fresh, strict=False):
            wrong = int((store[images.name(place)].ravel() != grid).sum())
            if wrong > LARGEST_SHARE * grid.size:
                raise TokenStoreError(
                    f"token store `{store.path}`: {wrong} of {grid.size} tokens of image "
                    f"`{images.path(place)}` differ from fresh ones: the image or the pipeline has "
                    "changed since; extract into another store"
                )
            different, tokens = different + wrong, tokens + grid.size
    return Verification(len(drawn), tokens, different)
