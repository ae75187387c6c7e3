"""Weights from and to other libraries."""
