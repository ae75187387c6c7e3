"""Metrics."""

from mapet_mm.evaluation.metrics.token_accuracy import LayerwiseAccuracy, TokenAccuracy

__all__ = ["LayerwiseAccuracy", "TokenAccuracy"]
