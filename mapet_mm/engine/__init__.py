"""Hooks, optimizers and metrics; the strategies are in `sharding`."""

from mapet_mm.engine import (  # noqa: F401
    autocast,
    compilation,
    cpu_processes,
    epoch_seed,
    knn,
    layer_decay,
    metrics,
    portable_checkpoint,
    strides,
    token_check,
    token_usage,
    total_batch,
)
