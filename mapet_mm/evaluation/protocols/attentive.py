"""Attentive probe: one learned query looks at the patch tokens, a linear layer classifies what it sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mapet_mm.evaluation.protocol import PROTOCOLS, Evaluated, Row, at_edge
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
            values = nn.init.trunc_normal_(torch.empty(shape), std=0.02, generator=generator)
            return nn.Parameter(values)

        self.query = start(dim)
        self.key = start(dim, dim)
        self.value = start(dim, dim)
        self.value_bias = nn.Parameter(torch.zeros(dim))
        self.bias = nn.Parameter(torch.zeros(num_classes))
        self.classifier = start(num_classes, dim)

    def forward(self, tokens: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch class"]:
        """Logits."""
        key = self.key.unflatten(0, (self.heads, -1))  # H E D
        value = self.value.unflatten(0, (self.heads, -1))  # H E D
        query = self.query.view(self.heads, 1, -1)  # H 1 E
        seen = tokens @ (query @ key / math.sqrt(query.shape[2])).squeeze(1).T  # B N H
        pooled = seen.softmax(1).mT @ tokens  # B H D
        values = torch.einsum("bhd,hed->bhe", pooled, value).flatten(1) + self.value_bias
        return F.linear(values, self.classifier, self.bias)


@PROTOCOLS.register_module()
@dataclass(eq=False)
class AttentiveProbe(TrainedProbe):
    """CAPI's attentive probe of the last layer's patch tokens (Darcet et al., 2025).

    Rates, decays, betas, batch and warm-up (a tenth of the steps) come from its `eval_classification.py`,
    which trains on crops drawn anew, for 12,500 steps of 8 GPUs; here features are taken once.

    Args:
        decays: of the weights, not of the biases, each tried with each rate.
    """

    rates: Sequence[float] = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
    decays: Sequence[float] = (5e-4, 1e-3, 5e-2)
    batch_size: int = 128
    least_steps: int = 2500

    name = "attentive probe"
    kind = "tokens"
    warmup = 0.1
    needs: ClassVar = {"train": ["tokens"], "val": ["tokens"]}

    def optimizer(self, groups: list[dict]) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(groups, betas=(0.9, 0.95))

    def groups(self, head: nn.Module, rate: float, decay: float = 0.0) -> list[dict]:
        """Biases without decay, and weights with it."""
        biases = [value for name, value in head.named_parameters() if "bias" in name]
        weights = [value for name, value in head.named_parameters() if "bias" not in name]
        rate = rate * self.batch_size / 256
        return [
            {"params": biases, "lr": rate, "weight_decay": 0.0},
            {"params": weights, "lr": rate, "weight_decay": decay},
        ]

    def run(self, evaluated: Evaluated) -> list[Row]:
        """One row of the setting that held-out images choose; none for a backbone without patch tokens."""
        train, _, num_classes = self.labelled(evaluated)
        if train.grid == (0, 0):
            return []
        settings = list(product(self.rates, self.decays))
        heads = []
        groups = []
        for rate, decay in settings:
            head = AttentiveClassifier(train.dim, num_classes).to(evaluated.device)
            heads.append(head)
            groups += self.groups(head, rate, decay)
        top1 = self.trained(evaluated, heads, groups)
        best = max(range(len(settings)), key=top1.__getitem__)  # of equals the first
        rate, decay = settings[best]
        note = f"rate {rate:g}{at_edge(rate, self.rates)}, decay {decay:g}{at_edge(decay, self.decays)}"
        return self.rows(evaluated, "patch tokens, last layer", partial(self.scores, heads[best]), note=note)
