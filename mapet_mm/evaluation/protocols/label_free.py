"""Figures that need no labels: rank, spectrum and spread of features, agreement of views, norms of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mapet_mm.evaluation.features import Features
from mapet_mm.evaluation.images import ImageSet
from mapet_mm.evaluation.metrics.rank_me import (
    alignment,
    alpha_req,
    effective_rank,
    lidar,
    rank_me,
    uniformity,
)
from mapet_mm.evaluation.protocol import PROTOCOLS, Evaluated, Protocol
from mapet_mm.evaluation.tables import Row

COMPARED = 4096  # images, for uniformity
# A maximum far off betrays outlier tokens: registers are missing.
QUANTILES = {"1 %": 0.01, "median": 0.5, "99 %": 0.99, "maximum": 1.0}
DETAILS = ("1 %", "99 %")


@PROTOCOLS.register_module()
class LabelFree(Protocol):
    """RankMe, alpha-ReQ and uniformity of the last layer, and the patch tokens' norms.

    With a second view of the `val` images, `view`, alignment and LiDAR too. Uniformity compares at most
    4,096 images, evenly spaced.
    """

    def needs(self, images: Mapping[str, ImageSet]) -> Mapping[str, Sequence[str]]:
        """The second view if there is one."""
        needed = {"val": ["pooled", "tokens"]}
        return {**needed, "view": ["pooled"]} if "view" in images else needed

    def unfit(self, images: Mapping[str, ImageSet], features: Mapping[str, Features]) -> str | None:
        """A second view of other images."""
        if "view" in images and len(images["view"]) != len(images["val"]):
            return "`view` has another number of images than `val`, whose second view it is"
        return None

    def rows(self, evaluated: Evaluated) -> list[Row]:
        """One row per kind of feature and per quantile of the norms."""
        val = evaluated.features["val"]
        rows = []
        if val.grid != (0, 0):
            rows += rows_of_tokens(val)
        for pooling in val.poolings:
            rows += rows_of_pooling(val, evaluated.features.get("view"), pooling)
        return rows


def rows_of_tokens(val: Features) -> list[Row]:
    """RankMe of the patch tokens, and quantiles of their norms."""
    gram = torch.zeros(val.dim, val.dim, dtype=torch.float64)
    norms = []
    for _, tokens in val.blocks("tokens"):  # b N D
        flat = tokens.flatten(0, 1).double()
        gram += flat.T @ flat
        norms.append(tokens.norm(dim=-1).flatten())
    rows = [Row("RankMe", "patch tokens", effective_rank(gram), "effective rank")]
    found = np.quantile(torch.cat(norms).numpy(), list(QUANTILES.values()))
    for name, value in zip(QUANTILES, found.tolist(), strict=True):
        rows.append(Row("patch tokens' norm", name, value, "L2 norm", detail=name in DETAILS))
    return rows


def rows_of_pooling(val: Features, view: Features | None, pooling: str) -> list[Row]:
    """Rank, spectrum and spread of the class tokens or patch means; with a second view their agreement."""
    features = val.pooled(pooling)
    name = "patch mean" if pooling == "mean" else pooling
    rows = [
        Row("RankMe", name, rank_me([features]), "effective rank"),
        Row("alpha-ReQ", name, alpha_req(features), "exponent"),
        Row("uniformity", name, sampled_uniformity(features), "log potential"),
    ]
    if view:
        second = view.pooled(pooling)
        rows.append(Row("alignment", name, alignment(features, second), "squared distance"))
        rows.append(Row("LiDAR", name, lidar(torch.stack([features, second], dim=1)), "effective rank"))
    return rows


def sampled_uniformity(features: Float[Tensor, "image dim"]) -> float:
    """Uniformity of at most 4,096 images, evenly spaced among all: its cost grows with their square."""
    compared = torch.linspace(0, len(features) - 1, min(len(features), COMPARED)).long()
    return uniformity(features[compared])
