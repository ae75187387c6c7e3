"""Token stores: a grid of ids per image, written in blocks, sealed, and read by name."""

from mapet_mm.structures.store.changes import extend_store, merge_stores
from mapet_mm.structures.store.errors import MissingTokensError, TokenStoreError
from mapet_mm.structures.store.token_store import TokenStore

__all__ = ["MissingTokensError", "TokenStore", "TokenStoreError", "extend_store", "merge_stores"]
