"""Hooks, optimizers, metrics and the strategy."""

from importlib import import_module
from typing import Any

from mapet_mm.engine.autocast import AutocastOptimWrapper
from mapet_mm.engine.class_names import ClassNamesCheckHook
from mapet_mm.engine.compilation import CompileHook
from mapet_mm.engine.cpu_processes import CPUDistributedDataParallel
from mapet_mm.engine.epoch_seed import EpochSeedHook
from mapet_mm.engine.health import HealthHook
from mapet_mm.engine.interruption import InterruptionHook
from mapet_mm.engine.knn import KNNProbeHook
from mapet_mm.engine.layer_decay import LayerDecayOptimWrapperConstructor
from mapet_mm.engine.metrics import LayerwiseAccuracy, TokenAccuracy
from mapet_mm.engine.non_finite import NonFiniteHook
from mapet_mm.engine.portable_checkpoint import PortableCheckpointHook
from mapet_mm.engine.resumed_recipe import ResumedRecipeHook
from mapet_mm.engine.strides import StrideCheckHook
from mapet_mm.engine.stuck_loader import StuckLoaderHook
from mapet_mm.engine.token_check import TokenStoreCheckHook
from mapet_mm.engine.token_usage import TokenUsageHook
from mapet_mm.engine.total_batch import TotalBatchHook

__all__ = [
    "AutocastOptimWrapper",
    "CPUDistributedDataParallel",
    "ClassNamesCheckHook",
    "CompileHook",
    "EpochSeedHook",
    "HealthHook",
    "InterruptionHook",
    "KNNProbeHook",
    "LayerDecayOptimWrapperConstructor",
    "LayerwiseAccuracy",
    "NonFiniteHook",
    "PortableCheckpointHook",
    "ResumedRecipeHook",
    "StrideCheckHook",
    "StuckLoaderHook",
    "TokenAccuracy",
    "TokenStoreCheckHook",
    "TokenUsageHook",
    "TotalBatchHook",
]

# Imported when they are asked for: few runs need what they import.
_ON_DEMAND = {
    "FeatureProbeHook": "mapet_mm.evaluation.hook",
    "FullyShardedStrategy": "mapet_mm.engine.sharding",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ON_DEMAND[name]), name)
