"""Frozen evaluation: what a backbone's features are worth, whatever backbone it is."""

from mapet_mm.evaluation import dense_protocols, nearest_neighbours, picture_protocols  # noqa: F401
