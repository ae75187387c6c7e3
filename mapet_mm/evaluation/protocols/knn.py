"""k-NN on the pooled features: nothing is trained."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from mapet_mm.engine.hooks.knn_probe_hook import (
    Neighbours,
    check_neighbours,
    check_temperature,
    count_votes,
    keep_nearest,
    keys_by_angle,
    queries_by_angle,
)
from mapet_mm.evaluation.features import Features
from mapet_mm.evaluation.image_sets import ImageSet
from mapet_mm.evaluation.protocol import PROTOCOLS, Classification, Evaluated, Row
from mapet_mm.utils.errors import UserError


@PROTOCOLS.register_module()
class NearestNeighbours(Classification):
    """Top-1 of the k most similar training images, which vote with `exp(similarity / temperature)`.

    Args:
        k: neighbours that vote.
        temperature: of the votes, above 0.
    """

    def __init__(self, k: int = 20, temperature: float = 0.07) -> None:
        check_temperature(temperature)
        self.k, self.temperature = k, temperature

    def check(self, images: Mapping[str, ImageSet]) -> None:
        """See `check_labels`; and there are k images to learn from."""
        super().check(images)
        try:
            check_neighbours(self.k, number := len(images["train"]))
        except ValueError as error:
            raise UserError(
                f"{error}: give its entry in `evaluation.protocols` another `k`, or the default one by "
                f"`--cfg-options knn_probe.k={number}`"
            ) from error

    def run(self, evaluated: Evaluated) -> list[Row]:
        """A row for the last layer's class token, patch mean, and both side by side."""
        train, val, num_classes = self.labelled(evaluated)
        check_neighbours(self.k, len(train))
        rows = []
        for pooling in train.poolings:
            queries = val.pooled(pooling).to(evaluated.device)
            similarity, voters = neighbours(queries, train, pooling, self.k)
            votes = count_votes(similarity, voters, num_classes, self.temperature)
            right = votes.argmax(1) == val.labels.to(evaluated.device)
            rows.append(Row("k-NN", pooling, 100 * right.float().mean().item()))
        return rows


def neighbours(queries: Float[Tensor, "query dim"], train: Features, pooling: str, k: int) -> Neighbours:
    """Similarities and labels of the k most similar training images, which are read a block at a time.

    The similarities are less a number of each query's own (see `queries_by_angle`).

    Args:
        queries: features, on the device where they are compared.
        train: the training images.
        pooling: of the last layer.
        k: number of neighbours.
    """
    best = (
        queries.new_full((len(queries), k), float("-inf")),
        torch.zeros(len(queries), k, dtype=torch.int64, device=queries.device),
    )
    queries, centre = queries_by_angle(queries)
    for rows, values in train.blocks("pooled", -1):
        block = keys_by_angle(train.pool(values, pooling).to(queries.device), centre)
        labels = train.labels[rows].to(queries.device)
        best = keep_nearest([best, (queries @ block.T, labels.expand(len(queries), -1))], k)
    return best
