"""Hooks, optimizers, metrics and strategies."""

from mapet_mm.engine import (  # noqa: F401
    autocast,
    compilation,
    epoch_seed,
    knn,
    layer_decay,
    metrics,
    sharding,
    token_check,
)
