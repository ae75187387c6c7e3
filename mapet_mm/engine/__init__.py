"""Hooks, optimizers and metrics."""

from mapet_mm.engine import token_check  # noqa: F401
