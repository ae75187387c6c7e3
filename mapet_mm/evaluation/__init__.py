"""Frozen evaluation: what a backbone's features are worth, whatever backbone it is."""

# The protocols' version. Raise it when one gives another figure for the same features: tables then tell
# old records from new ones. 1 was that of 2026-11-22; 2 normalises the parts of `both` and chooses on
# training images; 3 holds out every tenth image of each class, not of the whole list, and tells
# `linear (SGD)` from `linear (solved)`, which were one row.
VERSION = 3
