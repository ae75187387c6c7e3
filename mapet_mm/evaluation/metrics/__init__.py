"""Metrics."""

from mapet_mm.evaluation.metrics.by_image import ByImage
from mapet_mm.evaluation.metrics.token_accuracy import LayerwiseAccuracy, TokenAccuracy

__all__ = ["ByImage", "LayerwiseAccuracy", "TokenAccuracy"]
