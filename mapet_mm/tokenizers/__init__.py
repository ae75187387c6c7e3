"""Visual tokens: how they are made (`grid_kmeans`, `kclip`, `frozen`, `precomputed`) and stored (`store`)."""

from mapet_mm.tokenizers.base import Tokenizer, full_float32
from mapet_mm.tokenizers.codebook import Codebook, CodebookError
from mapet_mm.tokenizers.frozen import FrozenTokenizer, TokenizerError
from mapet_mm.tokenizers.grid_kmeans import GridKMeans
from mapet_mm.tokenizers.grid_layout import GridError
from mapet_mm.tokenizers.kclip import KCLIP, grid_features
from mapet_mm.tokenizers.precomputed import PrecomputedTokens
from mapet_mm.tokenizers.store import (
    MissingTokensError,
    TokenStore,
    TokenStoreError,
    extend_store,
    merge_stores,
)

__all__ = [
    "KCLIP",
    "Codebook",
    "CodebookError",
    "FrozenTokenizer",
    "GridError",
    "GridKMeans",
    "MissingTokensError",
    "PrecomputedTokens",
    "TokenStore",
    "TokenStoreError",
    "Tokenizer",
    "TokenizerError",
    "extend_store",
    "full_float32",
    "grid_features",
    "merge_stores",
]
