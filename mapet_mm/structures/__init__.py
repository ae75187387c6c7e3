"""Codebooks and token stores: what rests on disk, below the models."""

from mapet_mm.structures.codebook import Codebook, CodebookError
from mapet_mm.structures.tensor_file import TokenStoreError
from mapet_mm.structures.token_store import MissingTokensError, TokenStore, extend_store, merge_stores
