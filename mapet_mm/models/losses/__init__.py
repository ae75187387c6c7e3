"""Losses over vocabularies."""
