"""Nearest neighbours: images vote for the class of images that resemble them, and nothing is trained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from mmengine.dist import all_gather
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from mapet_mm.evaluation.features import FeatureBank
from mapet_mm.evaluation.protocol import PROTOCOLS, Classification, Evaluated, Row

# Queries and training images compared at once: 128 MiB of similarities.
ROWS, COLUMNS = 2**11, 2**14


def knn_votes(
    queries: Float[Tensor, "query dim"],
    known: Iterable[tuple[Float[Tensor, "some dim"], Int64[Tensor, " some"]]],
    num_classes: int,
    k: int = 20,
    temperature: float = 0.07,
) -> Float[Tensor, "query class"]:
    """Votes for each class: the k most similar training images vote with `exp(cosine / temperature)`.

    If there are fewer than k training images, all vote. Several processes each compare all queries with their
    own training images; only each query's k nearest go from process to process.

    Args:
        queries: `(Q, D)` of the images to classify, the same in all processes.
        known: features and labels of this process's training images, some at a time. Only one part is
            normalised at a time, so the memory is that of the features.
        num_classes: number of classes.
        k: neighbours that vote.
        temperature: of the votes.

    Returns:
        `(Q, C)`, relative to the vote of the nearest.
    """
    keys = ((F.normalize(features.to(queries.device), dim=1), labels) for features, labels in known)
    similarity, voters = nearest(F.normalize(queries, dim=1), keys, k)
    similarity, voters = _largest(zip(all_gather(similarity), all_gather(voters), strict=True), k)
    # Relative to the largest, because exp(1 / temperature) overflows float32 for temperatures up to 0.011.
    relative = similarity - similarity[:, :1]
    votes = torch.zeros(len(queries), num_classes, device=queries.device)
    weights = (relative / temperature).exp().to(votes.dtype)  # PyTorch 2.6 adds no float16 to float32
    return votes.scatter_add_(1, voters, weights)


def comparable(features: Float[Tensor, "row width"], pooling: str) -> Float[Tensor, "row width"]:
    """Features whose cosine weighs class token and patch mean alike: of 'both', each is normalised."""
    return F.normalize(features.unflatten(1, (2, -1)), dim=2).flatten(1) if pooling == "both" else features


def nearest(
    queries: Float[Tensor, "query dim"],
    known: Iterable[tuple[Float[Tensor, "some dim"], Int64[Tensor, " some"]]],
    k: int,
) -> tuple[Float[Tensor, "query k"], Int64[Tensor, "query k"]]:
    """The k largest products of each query with some keys, in falling order, and what belongs to these keys.

    Of keys, with a number for each (its label, its place), some come at a time. If there are fewer than k,
    products of minus infinity with the number 0 fill up.
    """
    products = queries.new_full((len(queries), k), float("-inf"))
    numbers = torch.zeros(len(queries), k, dtype=torch.int64, device=queries.device)
    for keys, own in known:
        keys, own = keys.to(queries.device), own.to(queries.device)
        for start in range(0, len(queries), ROWS):
            rows = slice(start, start + ROWS)
            found, places = (queries[rows] @ keys.T).topk(min(k, len(keys)), dim=1)
            products[rows], numbers[rows] = _largest(
                [(products[rows], numbers[rows]), (found, own[places])], k
            )
    return products, numbers


def _largest(parts: Iterable[tuple[Tensor, Tensor]], k: int) -> tuple[Tensor, Tensor]:
    """The k largest products in some parts' columns, in falling order, with the numbers beside them."""
    products, numbers = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    products, places = products.topk(k, dim=1)
    return products, numbers.gather(1, places)


@PROTOCOLS.register_module()
@dataclass(eq=False)
class NearestNeighbours(Classification):
    """Top-1 of the k most similar training images, which vote with `exp(cosine / temperature)`.

    k, weights and temperature are DINO's (Caron et al., 2021), as is the class token, the first row.

    Args:
        k: neighbours that vote; all training images if there are fewer.
        temperature: of the votes, above 0.
    """

    k: int = 20
    temperature: float = 0.07

    name = "k-NN"

    def run(self, evaluated: Evaluated) -> list[Row]:
        """A row for the last layer's class token, patch mean, and both side by side."""
        train, _, num_classes = self.labelled(evaluated)
        rows = []
        for pooling in train.poolings:

            def votes(bank: FeatureBank, pooling: str = pooling) -> Tensor:
                known = (
                    (comparable(train.pooled(pooling, images=images), pooling), train.labels[images])
                    for images in tqdm(torch.arange(len(train)).split(COLUMNS), f"k-NN, {pooling}", delay=2)
                )
                queries = comparable(bank.pooled(pooling).to(evaluated.device), pooling)
                return knn_votes(queries, known, num_classes, self.k, self.temperature)

            rows += self.rows(evaluated, pooling, votes)
        return rows
