"""MaPeT for OpenMMLab: masked and permuted pre-training of Vision Transformers."""

from mapet_mm.dependencies import check_openmmlab

__version__ = "0.1.0"

check_openmmlab()
