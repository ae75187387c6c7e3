"""Codebooks and token stores: what rests on disk, below the models."""

from mapet_mm.structures.codebook import Codebook, CodebookError
from mapet_mm.structures.store import (
    MissingTokensError,
    TokenStore,
    TokenStoreError,
    extend_store,
    merge_stores,
)

__all__ = [
    "Codebook",
    "CodebookError",
    "MissingTokensError",
    "TokenStore",
    "TokenStoreError",
    "extend_store",
    "merge_stores",
]
