"""k-NN on the pooled features: nothing is trained."""

from __future__ import annotations

from mapet_mm.engine.knn import knn_predict
from mapet_mm.evaluation.image_sets import check_labels
from mapet_mm.evaluation.protocols import PROTOCOLS, Evaluated, Protocol, Row


@PROTOCOLS.register_module()
class NearestNeighbours(Protocol):
    """Top-1 of the k most similar training images, which vote with `exp(similarity / temperature)`.

    Args:
        k: neighbours that vote.
        temperature: of the votes.
    """

    def __init__(self, k: int = 20, temperature: float = 0.07) -> None:
        self.k, self.temperature = k, temperature

    def run(self, evaluated: Evaluated) -> list[Row]:
        """A row for the last layer's class token, patch mean, and both side by side."""
        num_classes = check_labels(*(evaluated.images[name] for name in ("train", "val")))
        train, val = evaluated.features["train"], evaluated.features["val"]
        rows = []
        for pooling in train.poolings:
            queries, labels = val.pooled(pooling).to(evaluated.device), val.labels.to(evaluated.device)
            known = train.pooled(pooling).to(evaluated.device), train.labels.to(evaluated.device)
            predicted = knn_predict(*known, queries, num_classes, self.k, self.temperature)
            rows.append(Row("k-NN", pooling, 100 * (predicted == labels).float().mean().item()))
        return rows
