"""Hooks, optimizers and metrics."""

from mapet_mm.engine import autocast, layer_decay, metrics, token_check  # noqa: F401
