"""Data sets, transforms and preprocessors."""

from mapet_mm.datasets import preprocessor, transforms  # noqa: F401
