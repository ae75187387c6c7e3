"""Hooks, optimizers and metrics."""

from mapet_mm.engine import autocast, epoch_seed, layer_decay, metrics, token_check  # noqa: F401
