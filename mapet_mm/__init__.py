"""MaPeT for OpenMMLab: masked and permuted pre-training of Vision Transformers."""

import warnings
from importlib import import_module
from typing import Any

from mapet_mm.dependencies import check_openmmlab, forget_missing_backend

__version__ = "0.1.0"

# What is imported when it is first used, and from where.
LAZY = {
    "LoadPicture": "mapet_mm.datasets",
    "StoredImages": "mapet_mm.datasets",
    "TIMMViT": "mapet_mm.models",
    "evaluate": "mapet_mm.python",
    "finetune": "mapet_mm.python",
    "load": "mapet_mm.python",
    "pretrain": "mapet_mm.python",
}

check_openmmlab()
forget_missing_backend()
# MMCV without compiled operators says so at each start; nothing here needs this one.
warnings.filterwarnings("ignore", message="Fail to import ``MultiScaleDeformableAttention``")


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(LAZY[name]), name)
