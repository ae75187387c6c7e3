"""Visual tokens: how they are made (by the target generators) and stored (in token stores)."""

from mapet_mm.models.target_generators.frozen_tokenizer import FrozenTokenizer
from mapet_mm.models.target_generators.grid_kmeans import GridKMeans
from mapet_mm.models.target_generators.kclip import KCLIP, grid_features
from mapet_mm.models.target_generators.precomputed_tokens import PrecomputedTokens
from mapet_mm.models.target_generators.tokenizer import TokenizerError
from mapet_mm.structures import (
    Codebook,
    CodebookError,
    MissingTokensError,
    TokenStore,
    TokenStoreError,
    extend_store,
    merge_stores,
)
from mapet_mm.tokenizers.kmeans import fit_codebook
from mapet_mm.utils.precision import full_float32
