"""All protocols, in the order of the table."""

from mapet_mm.evaluation.protocols import knn, linear, low_shot, attentive  # noqa: F401, I001
from mapet_mm.evaluation import dense_protocols, picture_protocols  # noqa: F401
