"""Check a token store: its files against their checksums, and some images against newly computed tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mapet_mm.models.target_generators.base import Tokenizer
from mapet_mm.structures.image_names import changed_since
from mapet_mm.structures.store import TokenStore, TokenStoreError
from mapet_mm.structures.store.manifest import GENERATION, MANIFEST
from mapet_mm.tokenizers.image_groups import GroupLoader, split
from mapet_mm.tokenizers.images import NOT_FINITE, NamedImages

# A feature between two centroids may be assigned differently on another device; a wrong image, weights file
# or pipeline changes most of an image's tokens.
LARGEST_SHARE = 0.05


class Verification(NamedTuple):
    """Numbers of images tokenised again, of their tokens, of tokens that differ from the store's, and of all
    image files that have changed since the store was made."""

    images: int
    tokens: int
    different: int
    changed: int

    def __str__(self) -> str:
        found = f"{self.different} of {self.tokens} tokens of {self.images} images differ from fresh ones"
        if self.changed <= self.images:
            return found
        return (
            f"{found}; {self.changed} image files are newer than the store: --verify {self.changed} for all"
        )


def verify_store(
    tokenizer: Tokenizer,
    loader: GroupLoader,
    store: TokenStore,
    count: int = 256,
    seed: int = 0,
) -> Verification:
    """Check a sealed store against its checksums, and `count` random images against newly computed tokens.

    Images whose files have changed since the store was made are taken first.

    Raises:
        TokenStoreError: another tokenizer made the store, it is not sealed, a file has changed, or more than
            5 % of an image's tokens differ (fewer are ties that devices break differently).
    """
    store.require_tokenizer(tokenizer.digest, "the config's tokenizer")
    store.verify_checksums()
    images = loader.images
    changed, others = _places(store, images)
    rng = np.random.default_rng(seed)
    drawn = [*rng.permutation(changed).tolist(), *rng.permutation(others).tolist()][:count]
    groups = ((0, group) for group in split(sorted(drawn), loader.group_size))
    different, tokens = 0, 0
    for group in loader.load(groups):
        for place, reason in group.unreadable.items():
            raise TokenStoreError(f"image `{images.path(place)}` could not be decoded ({reason})")
        fresh = tokenizer(group.inputs).cpu().numpy()
        for place, grid in zip(group.places, fresh, strict=False):
            if grid.min() < 0:
                raise TokenStoreError(
                    f"image `{images.path(place)}` could not be encoded ({NOT_FINITE}): its tokens in token "
                    f"store `{store.path}` mean nothing; extract into another store, with --on-error skip"
                )
            wrong = int((store[images.name(place)].ravel() != grid).sum())
            if wrong > LARGEST_SHARE * grid.size:
                raise TokenStoreError(
                    f"token store `{store.path}`: {wrong} of {grid.size} tokens of image "
                    f"`{images.path(place)}` differ from fresh ones: the image or the pipeline has "
                    "changed since; give the image another name, so that it counts as new, or extract into "
                    "another store"
                )
            different, tokens = different + wrong, tokens + grid.size
    return Verification(len(drawn), tokens, different, len(changed))


def _places(store: TokenStore, images: NamedImages) -> tuple[list[int], list[int]]:
    """Images with tokens: those whose files have changed since the store was made, and the others."""
    made = min(file.stat().st_mtime for file in store.path.glob(f"{GENERATION}*/{MANIFEST}"))
    skipped, changed, others = store.skipped, [], []
    for name, place in images.places("reading names").items():
        if name not in skipped:
            (changed if changed_since(images.data_root, name, made) else others).append(place)
    return changed, others
