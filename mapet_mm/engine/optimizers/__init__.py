"""Optimizer wrappers and constructors."""
