"""Codebooks (centroids of encoder features), how they are fitted, and the features to fit them on."""

from mapet_mm.tokenizers.codebook.codebook import Codebook, CodebookError, KMeansOptions

__all__ = ["Codebook", "CodebookError", "KMeansOptions"]
