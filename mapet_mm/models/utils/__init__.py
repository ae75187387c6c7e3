"""Objectives, layout, permutation, attention: the parts that models are built from."""
