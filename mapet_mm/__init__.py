"""MaPeT for OpenMMLab: masked and permuted pre-training of Vision Transformers."""

__version__ = "0.1.0"
