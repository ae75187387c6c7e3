"""Attentive probe: one learned query looks at the patch tokens, a linear layer classifies what it sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mapet_mm.evaluation.protocol import PROTOCOLS, Evaluated, Row
from mapet_mm.evaluation.protocols.probes import TrainedProbe

HEAD_WIDTH = 64


class AttentiveClassifier(nn.Module):
    """CAPI's attentive probe: a query, keys and values of the tokens, and a linear layer.

    With one query per head, keys and values need not be made for each token: `q . (K x) = (K^T q) . x`, and
    the weighted sum of values is the value of the weighted sum of tokens. A bias of the keys would change
    nothing.

    Args:
        dim: width of the tokens, `D`; heads are about 64 wide.
        num_classes: number of classes.
    """

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.heads = max(1, dim // HEAD_WIDTH)
        while dim % self.heads:
            self.heads -= 1
        generator = torch.Generator().manual_seed(0)  # the same start for all rates

        def start(*shape: int) -> nn.Parameter:
            return nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=0.02, generator=generator))

        self.query, self.key, self.value = start(dim), start(dim, dim), start(dim, dim)
        self.value_bias, self.bias = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(num_classes))
        self.classifier = start(num_classes, dim)

    def forward(self, tokens: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch class"]:
        """Logits."""
        key, value = (weight.unflatten(0, (self.heads, -1)) for weight in (self.key, self.value))  # H E D
        query = self.query.view(self.heads, 1, -1)
        seen = tokens @ (query @ key / math.sqrt(query.shape[2])).squeeze(1).T  # B N H
        pooled = seen.softmax(1).mT @ tokens  # B H D
        values = torch.einsum("bhd,hed->bhe", pooled, value).flatten(1) + self.value_bias
        return F.linear(values, self.classifier, self.bias)


@PROTOCOLS.register_module()
@dataclass(eq=False)
class AttentiveProbe(TrainedProbe):
    """CAPI's attentive probe of the last layer's patch tokens; the rate that classifies `val` best counts.

    AdamW, with a tenth of the steps to warm up.
    """

    rates: Sequence[float] = (1e-4, 5e-4, 2e-3, 1e-2)
    batch_size: int = 128
    weight_decay: float = 5e-4

    kind, warmup, needs = "tokens", 0.1, {"train": ["tokens"], "val": ["tokens"]}

    def optimizer(self, groups: list[dict]) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(groups, weight_decay=self.weight_decay)

    def run(self, evaluated: Evaluated) -> list[Row]:
        """One row; no row for a backbone without patch tokens."""
        train, _, num_classes = self.labelled(evaluated)
        if train.grid == (0, 0):
            return []
        heads = [AttentiveClassifier(train.dim, num_classes) for _ in self.rates]
        top1, rate = max(zip(self.top1(evaluated, heads, self.rates), self.rates, strict=True))
        return [Row("attentive probe", "patch tokens, last layer", top1, note=f"rate {rate:g}")]
