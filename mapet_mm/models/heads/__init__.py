"""Heads that predict tokens or classes."""
