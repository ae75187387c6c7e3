"""Attentive probe: one learned query looks at the patch tokens, a linear layer classifies what it sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mapet_mm.evaluation.protocol import PROTOCOLS, Evaluated
from mapet_mm.evaluation.protocols.classification import at_edge
from mapet_mm.evaluation.protocols.probes import StackedHeads, TrainedProbe
from mapet_mm.evaluation.tables import Row

HEAD_WIDTH = 64
# CAPI's, of the weights and not of the biases; each is tried with each rate.
DECAYS = (5e-4, 1e-3, 5e-2)


class AttentiveHeads(StackedHeads):
    """CAPI's attentive probes: each has a query, keys and values of the tokens, and a linear layer.

    With one query per attention head, keys and values need not be made for each token:
    `q . (K x) = (K^T q) . x`, and the weighted sum of values is the value of the weighted sum of tokens. A
    bias of the keys would change nothing.

    Args:
        dim: width of the tokens, `D`; attention heads are about 64 wide.
        num_classes: number of classes.
        rates, decays: of each probe.
    """

    def __init__(self, dim: int, num_classes: int, rates: Sequence[float], decays: Sequence[float]) -> None:
        super().__init__(rates, decays)
        self.num_attentions = max(1, dim // HEAD_WIDTH)
        while dim % self.num_attentions:
            self.num_attentions -= 1
        generator = torch.Generator().manual_seed(0)  # the same start for all

        def start(*shape: int) -> nn.Parameter:
            values = nn.init.trunc_normal_(torch.empty(shape), std=0.02, generator=generator)
            return nn.Parameter(values.repeat(len(rates), *[1] * len(shape)))

        self.query = start(dim)
        self.key = start(dim, dim)
        self.value = start(dim, dim)
        self.value_bias = nn.Parameter(torch.zeros(len(rates), dim))
        self.bias = nn.Parameter(torch.zeros(len(rates), num_classes))
        self.classifier = start(num_classes, dim)

    def forward(self, tokens: Float[Tensor, "batch token dim"]) -> Float[Tensor, "head batch class"]:
        """Logits. Below, P are the probes, and each has H attention heads of width E."""
        query = self.query.unflatten(1, (self.num_attentions, -1))  # P H E
        key = self.key.unflatten(1, (self.num_attentions, -1))  # P H E D
        value = self.value.unflatten(1, (self.num_attentions, -1))  # P H E D
        wanted = torch.einsum("phe,phed->phd", query, key) / math.sqrt(query.shape[2])
        seen = tokens @ wanted.flatten(0, 1).T  # B N (P H)
        pooled = seen.softmax(1).mT @ tokens  # B (P H) D
        pooled = pooled.unflatten(1, wanted.shape[:2])  # B P H D
        values = torch.einsum("bphd,phed->pbhe", pooled, value).flatten(2) + self.value_bias[:, None]
        return values @ self.classifier.mT + self.bias[:, None]


@PROTOCOLS.register_module()
@dataclass(eq=False)
class AttentiveProbe(TrainedProbe):
    """CAPI's attentive probe of the last layer's patch tokens (Darcet et al., 2025).

    Rates, decays, betas, batch and warm-up (a tenth of the steps) come from its `eval_classification.py`,
    which trains on crops drawn anew, for 12,500 steps of 8 GPUs; here features are taken once.
    """

    rates: Sequence[float] = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
    batch_size: int = 128
    least_steps: int = 2500

    name = "attentive probe"
    kind = "tokens"
    warmup = 0.1

    def optimizer(self, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """AdamW; each head has a decay of its own."""
        return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def rows(self, evaluated: Evaluated) -> list[Row]:
        """One row of the setting that held-out images choose; none for a backbone without patch tokens."""
        train = evaluated.features["train"]
        if train.grid == (0, 0):
            return []
        settings = list(product(self.rates, DECAYS))
        stack = AttentiveHeads(train.dim, evaluated.num_classes, *zip(*settings, strict=True))
        (top1,) = self.trained(evaluated, [stack.to(evaluated.device)])
        best = max(range(len(settings)), key=top1.__getitem__)  # of equals the first
        rate, decay = settings[best]
        scores = partial(self.scores, stack.only(best))
        note = f"rate {rate:g}{at_edge(rate, self.rates)}, decay {decay:g}{at_edge(decay, DECAYS)}"
        return self.rows_of(evaluated, "patch tokens, last layer", scores, note=note)
