"""All protocols, in the order of the table."""

from mapet_mm.evaluation import (  # noqa: F401, I001
    nearest_neighbours,
    linear,
    low_shot,
    attentive,
    dense_protocols,
    picture_protocols,
)
