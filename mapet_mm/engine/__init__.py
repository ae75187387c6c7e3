"""Hooks, optimizers and metrics."""

from mapet_mm.engine import autocast, epoch_seed, knn, layer_decay, metrics, token_check  # noqa: F401
