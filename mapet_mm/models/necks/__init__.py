"""Necks between backbones and heads."""
