"""All protocols, in the order of the table."""

from mapet_mm.evaluation.protocols import knn, linear, low_shot, attentive, segmentation, label_free  # noqa: F401, I001
