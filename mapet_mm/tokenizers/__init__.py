"""Visual tokens: the k-CLIP tokenizer, its codebook, and the store of what it computed."""

from mapet_mm.tokenizers.codebook import Codebook, CodebookError
from mapet_mm.tokenizers.frozen import FrozenTokenizer, TokenizerError
from mapet_mm.tokenizers.kclip import KCLIP, grid_features
from mapet_mm.tokenizers.precomputed import PrecomputedTokens
from mapet_mm.tokenizers.token_store import MissingTokensError, TokenStore, TokenStoreError

__all__ = [
    "KCLIP",
    "Codebook",
    "CodebookError",
    "FrozenTokenizer",
    "MissingTokensError",
    "PrecomputedTokens",
    "TokenStore",
    "TokenStoreError",
    "TokenizerError",
    "grid_features",
]
