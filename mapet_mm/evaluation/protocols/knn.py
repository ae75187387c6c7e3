"""Nearest neighbours: images vote for the class of images that resemble them, and nothing is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from mapet_mm.evaluation.features import Features
from mapet_mm.evaluation.metrics.neighbours import COLUMNS, knn_votes
from mapet_mm.evaluation.protocol import PROTOCOLS, Evaluated
from mapet_mm.evaluation.protocols.classification import Classification
from mapet_mm.evaluation.tables import Row


@PROTOCOLS.register_module()
@dataclass(eq=False)
class NearestNeighbours(Classification):
    """Top-1 of the k most similar training images, which vote with `exp(cosine / 0.07)`.

    k, weights and temperature are DINO's (Caron et al., 2021), as is the class token, the first row. Where
    classes are of unequal size, votes are divided by the size of their class.

    Args:
        k: neighbours that vote; all training images if there are fewer.
    """

    k: int = 20

    name = "k-NN"

    def rows(self, evaluated: Evaluated) -> list[Row]:
        """A row for the last layer's class token, patch mean, and both side by side."""
        rows = []
        for setting in evaluated.features["train"].settings:
            rows += self.rows_of(evaluated, setting, partial(self.votes, evaluated, setting))
        return rows

    def votes(self, evaluated: Evaluated, setting: str, features: Features) -> Float[Tensor, "image class"]:
        """The training images' votes for a set's images."""
        train = evaluated.features["train"]
        queries = comparable(features.pooled(setting).to(evaluated.device), setting)
        known = voters(train, setting)
        return knn_votes(queries, known, evaluated.num_classes, self.k, weights=evaluated.class_weights)


def voters(train: Features, setting: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Features and labels of the training images, some at a time."""
    parts = torch.arange(len(train)).split(COLUMNS)
    for images in tqdm(parts, f"k-NN, {setting}", delay=2):
        yield comparable(train.pooled(setting, images=images), setting), train.labels[images]


def comparable(features: Float[Tensor, "row width"], setting: str) -> Float[Tensor, "row width"]:
    """Features whose cosine weighs class token and patch mean alike: of 'both', each is normalised."""
    if setting != "both":
        return features
    halves = features.unflatten(1, (2, -1))  # n 2 D
    return F.normalize(halves, dim=2).flatten(1)
