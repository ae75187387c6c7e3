"""Figures that need no labels: rank, spectrum and spread of features, agreement of views, norms of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch

from mapet_mm.evaluation.image_sets import ImageSet, ImageSetError
from mapet_mm.evaluation.metrics.rank_me import (
    alignment,
    alpha_req,
    effective_rank,
    lidar,
    rank_me,
    uniformity,
)
from mapet_mm.evaluation.protocol import PROTOCOLS, Evaluated, Protocol, Row

COMPARED = 4096  # images, for uniformity
# A maximum far off betrays outlier tokens: registers are missing.
QUANTILES = {"1 %": 0.01, "median": 0.5, "99 %": 0.99, "maximum": 1.0}


@PROTOCOLS.register_module()
class LabelFree(Protocol):
    """RankMe, alpha-ReQ and uniformity of the last layer, and the patch tokens' norms.

    With a second view of the `val` images, `view`, alignment and LiDAR too. Uniformity compares at most
    4,096 images, evenly spaced.
    """

    needs: ClassVar = {"val": ["pooled", "tokens"]}

    def wanted(self, images: Mapping[str, ImageSet]) -> Mapping[str, Sequence[str]]:
        """The second view if there is one."""
        return {**self.needs, **({"view": ["pooled"]} if "view" in images else {})}

    def check(self, images: Mapping[str, ImageSet]) -> None:
        """Raise ImageSetError if the second view is of other images."""
        if "view" in images and len(images["view"]) != len(images["val"]):
            raise ImageSetError("`view` has another number of images than `val`, whose second view it is")

    def run(self, evaluated: Evaluated) -> list[Row]:
        """One row per kind of feature and per quantile of the norms."""
        bank, rows = evaluated.features["val"], []
        if math.prod(bank.grid):
            gram, norms = torch.zeros(bank.dim, bank.dim, dtype=torch.float64), []
            for _, tokens in bank.blocks("tokens"):
                gram += tokens.flatten(0, 1).double().T @ tokens.flatten(0, 1).double()
                norms.append(tokens.norm(dim=-1).flatten())
            rows.append(Row("RankMe", "patch tokens", effective_rank(gram), "effective rank"))
            found = np.quantile(torch.cat(norms).numpy(), list(QUANTILES.values()))
            for name, value in zip(QUANTILES, found.tolist(), strict=True):
                detail = name in ("1 %", "99 %")
                rows.append(Row("patch tokens' norm", name, value, "L2 norm", detail=detail))
        for pooling in bank.poolings[:2]:
            features, name = bank.pooled(pooling), "patch mean" if pooling == "mean" else pooling
            rows.append(Row("RankMe", name, rank_me([features]), "effective rank"))
            rows.append(Row("alpha-ReQ", name, alpha_req(features), "exponent"))
            some = torch.linspace(0, len(features) - 1, min(len(features), COMPARED)).long()
            rows.append(Row("uniformity", name, uniformity(features[some]), "log potential"))
            if view := evaluated.features.get("view"):
                both = features, view.pooled(pooling)
                rows.append(Row("alignment", name, alignment(*both), "squared distance"))
                rows.append(Row("LiDAR", name, lidar(torch.stack(both, dim=1)), "effective rank"))
        return rows
