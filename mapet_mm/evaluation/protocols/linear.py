"""Linear probes of every layer and pooling, trained by SGD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mapet_mm.evaluation.features import Features
from mapet_mm.evaluation.protocol import PROTOCOLS, Classification, Evaluated, Row, at_edge
from mapet_mm.evaluation.protocols.probes import StackedHeads, TrainedProbe

# Thirteen, as DINOv2's, but up to 100 instead of 0.1: the values of layers without a norm may be small.
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True)
class Chosen:
    """A layer's classifier with the setting that held-out images chose."""

    layer: str  # '3', 'output'
    top1: float  # on the held-out images
    scores: Callable[[Features], Float[Tensor, "image class"]]  # of a set's images
    note: str  # the choice: 'rate 0.1'


class LinearHeads(StackedHeads):
    """Linear classifiers of one pooling, which start alike whichever others are trained.

    Args:
        columns: of the pooling.
        num_classes: number of classes.
        rates: learning rate of each.
    """

    def __init__(self, columns: slice, num_classes: int, rates: Sequence[float]) -> None:
        super().__init__(rates)
        self.columns = columns
        width = columns.stop - columns.start
        start = 0.01 * torch.randn(num_classes, width, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter(start.repeat(len(rates), 1, 1))  # head class width
        self.bias = nn.Parameter(torch.zeros(len(rates), num_classes))

    def forward(self, values: Float[Tensor, "batch width"]) -> Float[Tensor, "head batch class"]:
        """Logits."""
        logits = F.linear(values[:, self.columns], self.weight.flatten(0, 1), self.bias.flatten())
        return logits.unflatten(1, self.bias.shape).transpose(0, 1)


@PROTOCOLS.register_module()
@dataclass(eq=False)
class LinearProbes(TrainedProbe):
    """Linear classifiers of every layer and pooling, trained by SGD with rates swept as DINOv2 does.

    One layer is trained at a time; held-out images choose each classifier's rate, and the layer. `Regression`
    solves the same classifiers, for sets whose features fit into memory.

    Args:
        layers: number of last layers that are probed; all by default.
    """

    rates: Sequence[float] = RATES
    layers: int | None = None

    name = "linear (SGD)"

    def optimizer(self, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

    def rows(self, evaluated: Evaluated) -> list[Row]:
        """Rows of the last layer and of the best one, for each pooling; of all layers in detail."""
        train = evaluated.features["train"]
        chosen: dict[str, list[Chosen]] = {pooling: [] for pooling in train.settings}
        for layer in probed_layers(train.layers, self.layers):
            for pooling, head in self.best_heads(evaluated, layer).items():
                chosen[pooling].append(head)
        rows = []
        for pooling, heads in chosen.items():
            rows += rows_of_layers(self, evaluated, pooling, heads)
        return rows

    def best_heads(self, evaluated: Evaluated, layer: int) -> dict[str, Chosen]:
        """Each pooling's head of a layer with the best rate on the held-out images, of equals the lowest."""
        train, _, num_classes = self.labelled(evaluated)
        # All poolings and rates are trained in one pass.
        stacks = []
        for pooling in train.settings:
            heads = LinearHeads(train.columns(pooling), num_classes, sorted(self.rates))
            stacks.append(heads.to(evaluated.device))
        top1 = self.trained(evaluated, stacks, layer)
        best = {}
        for pooling, stack, own in zip(train.settings, stacks, top1, strict=True):
            best[pooling] = self.best_head(train.layers[layer], layer, stack, own)
        return best

    def best_head(self, name: str, layer: int, stack: LinearHeads, top1: list[float]) -> Chosen:
        """The best of one pooling's heads, which have the protocol's rates in rising order."""
        best = max(range(len(stack)), key=top1.__getitem__)
        rate = sorted(self.rates)[best]
        note = f"rate {rate:g}{at_edge(rate, self.rates)}"
        if len(self.rates) > 1 and len(set(top1)) == 1:
            note = f"rate {rate:g}, all rates alike"
        return Chosen(name, top1[best], partial(self.scores, stack.only(best), layer=layer), note)


def probed_layers(names: Sequence[str], last: int | None) -> list[int]:
    """Indices of the last layers that are probed; of all if `last` is None."""
    return list(range(len(names)))[-(last or len(names)) :]


def rows_of_layers(
    protocol: Classification, evaluated: Evaluated, pooling: str, chosen: Sequence[Chosen]
) -> list[Row]:
    """Rows of the last layer, of the best one if there are several, and of each in detail.

    The best layer is the one that classifies the held-out images best, of equals the first.
    """
    last = chosen[-1]
    rows = protocol.rows_of(evaluated, f"{pooling}, last layer", last.scores, note=last.note)
    if len(chosen) > 1:
        best = max(chosen, key=lambda one: one.top1)
        note = f"layer {best.layer}, {best.note}"
        rows += protocol.rows_of(evaluated, f"{pooling}, best layer", best.scores, note=note)
    for one in chosen:
        setting = f"{pooling}, layer {one.layer}"
        rows += protocol.rows_of(evaluated, setting, one.scores, note=one.note, detail=True)
    return rows
