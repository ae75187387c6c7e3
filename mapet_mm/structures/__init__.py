"""Codebooks and token stores: what rests on disk, below the models."""

from mapet_mm.structures.codebook import Codebook, CodebookError
from mapet_mm.structures.store_changes import extend_store, merge_stores
from mapet_mm.structures.store_files import TokenStoreError
from mapet_mm.structures.token_store import MissingTokensError, TokenStore
