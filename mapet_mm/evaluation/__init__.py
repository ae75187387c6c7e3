"""Frozen evaluation: what a backbone's features are worth, whatever backbone it is."""
