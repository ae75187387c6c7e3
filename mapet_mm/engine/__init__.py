"""Hooks, optimizers and metrics; the strategies are in `sharding`."""

from mapet_mm.engine import (  # noqa: F401
    autocast,
    compilation,
    cpu_processes,
    epoch_seed,
    health,
    interruption,
    knn,
    layer_decay,
    metrics,
    non_finite,
    portable_checkpoint,
    strides,
    stuck_loader,
    token_check,
    total_batch,
)
