"""Data sets, transforms and preprocessors."""

from mapet_mm.datasets import masking, preprocessor, transforms, two_views  # noqa: F401
