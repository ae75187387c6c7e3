"""Visual tokens: how they are made (by the target generators) and stored (in token stores)."""

from mapet_mm.models.selfsup.tokenizer_training import CaptionCLIP, DiscreteAutoencoder, VQKDDistillation
from mapet_mm.models.target_generators.base import Tokenizer, TokenizerError, full_float32
from mapet_mm.models.target_generators.frozen_tokenizer import FrozenTokenizer
from mapet_mm.models.target_generators.grid_kmeans import GridKMeans
from mapet_mm.models.target_generators.kclip import KCLIP, grid_features
from mapet_mm.models.target_generators.precomputed_tokens import PrecomputedTokens
from mapet_mm.structures import (
    MissingTokensError,
    TokenStore,
    TokenStoreError,
    extend_store,
    merge_stores,
)
from mapet_mm.structures.codebook import Codebook, CodebookError

__all__ = [
    "KCLIP",
    "CaptionCLIP",
    "Codebook",
    "CodebookError",
    "DiscreteAutoencoder",
    "FrozenTokenizer",
    "GridKMeans",
    "MissingTokensError",
    "PrecomputedTokens",
    "TokenStore",
    "TokenStoreError",
    "Tokenizer",
    "TokenizerError",
    "VQKDDistillation",
    "extend_store",
    "full_float32",
    "grid_features",
    "merge_stores",
]
