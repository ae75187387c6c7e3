"""Figures that need no labels: the effective rank of features, and the norms of patch tokens."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch

from mapet_mm.evaluation.metrics.rank_me import effective_rank, rank_me
from mapet_mm.evaluation.protocol import PROTOCOLS, Evaluated, Protocol, Row

# A maximum far off betrays outlier tokens: registers are missing.
QUANTILES = {"1 %": 0.01, "median": 0.5, "99 %": 0.99, "maximum": 1.0}


@PROTOCOLS.register_module()
class LabelFree(Protocol):
    """RankMe of the last layer's patch tokens, patch means and class tokens, and the patch tokens' norms."""

    needs: ClassVar = {"val": ["pooled", "tokens"]}

    def run(self, evaluated: Evaluated) -> list[Row]:
        """One row per kind of feature and per quantile of the norms."""
        bank = evaluated.features["val"]
        rows = []
        if math.prod(bank.grid):
            gram, norms, means = torch.zeros(bank.dim, bank.dim, dtype=torch.float64), [], []
            for _, tokens in bank.blocks("tokens"):
                gram += tokens.flatten(0, 1).double().T @ tokens.flatten(0, 1).double()
                norms.append(tokens.norm(dim=-1).flatten())
                means.append(tokens.mean(1))
            rows.append(Row("RankMe", "patch tokens", effective_rank(gram), "effective rank"))
            rows.append(Row("RankMe", "patch mean", rank_me(means), "effective rank"))
        if "class token" in bank.poolings:
            rank = rank_me([bank.pooled("class token")])
            rows.append(Row("RankMe", "class token", rank, "effective rank"))
        if math.prod(bank.grid):
            found = np.quantile(torch.cat(norms).numpy(), list(QUANTILES.values()))
            for name, value in zip(QUANTILES, found.tolist(), strict=True):
                detail = name in ("1 %", "99 %")
                rows.append(Row("patch tokens' norm", name, value, "L2 norm", detail=detail))
        return rows
