"""All protocols, in the order of the table."""

from mapet_mm.evaluation import nearest_neighbours, linear, low_shot, attentive  # noqa: F401, I001
