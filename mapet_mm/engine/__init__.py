"""Hooks, optimizers and metrics; the strategies are in `sharding`."""

from mapet_mm.engine import (  # noqa: F401
    autocast,
    compilation,
    epoch_seed,
    knn,
    layer_decay,
    metrics,
    token_check,
    total_batch,
)
