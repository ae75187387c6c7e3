"""Data sets, transforms and preprocessors."""

from mapet_mm.datasets import masking, preprocessor, transforms  # noqa: F401
