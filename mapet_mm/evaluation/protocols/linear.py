"""Linear classifiers of every layer and pooling, trained by SGD."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mapet_mm.evaluation.features import Features
from mapet_mm.evaluation.protocol import PROTOCOLS, Evaluated
from mapet_mm.evaluation.protocols.classification import Classification, at_edge
from mapet_mm.evaluation.protocols.probes import StackedHeads, TrainedProbe
from mapet_mm.evaluation.tables import Row

# Thirteen, as DINOv2's, but up to 100 instead of 0.1: the values of layers without a norm may be small.
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True)
class Chosen:
    """A layer's classifier with the setting that held-out images chose."""

    layer: str  # '3', 'output'
    top1: float  # on the held-out images
    scores: Callable[[Features], Float[Tensor, "image class"]]  # of a set's images
    note: str  # the choice: 'rate 0.1'


def rows_of_layers(
    protocol: Classification, evaluated: Evaluated, best_of_layer: Callable[[int], Mapping[str, Chosen]]
) -> list[Row]:
    """For each pooling rows of the last layer, of the best one if there are several, and of each in detail.

    The best layer is the one that classifies the held-out images best, of equals the first.

    Args:
        protocol: its `layers` are the number of last layers; None for all.
        evaluated: features and images.
        best_of_layer: a layer's classifiers by pooling, given its index.
    """
    train = evaluated.features["train"]
    num_last = protocol.layers or len(train.layers)
    by_layer = [best_of_layer(layer) for layer in range(len(train.layers))[-num_last:]]
    rows = []
    for pooling in train.settings:
        chosen = [classifiers[pooling] for classifiers in by_layer]
        last = chosen[-1]
        rows += protocol.rows_of(evaluated, f"{pooling}, last layer", last.scores, note=last.note)
        if len(chosen) > 1:
            best = max(chosen, key=lambda one: one.top1)
            note = f"layer {best.layer}, {best.note}"
            rows += protocol.rows_of(evaluated, f"{pooling}, best layer", best.scores, note=note)
        for one in chosen:
            setting = f"{pooling}, layer {one.layer}"
            rows += protocol.rows_of(evaluated, setting, one.scores, note=one.note, detail=True)
    return rows


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

    One layer is trained at a time. `Regression` solves the same classifiers, for sets whose features fit into
    memory.

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
        """See `rows_of_layers`."""
        return rows_of_layers(self, evaluated, partial(self.best_of_layer, evaluated))

    def best_of_layer(self, evaluated: Evaluated, layer: int) -> dict[str, Chosen]:
        """Each pooling's head with the best rate on the held-out images, of equals the lowest."""
        train = evaluated.features["train"]
        # All poolings and rates are trained in one pass.
        stacks = {}
        for pooling in train.settings:
            heads = LinearHeads(train.columns(pooling), evaluated.num_classes, sorted(self.rates))
            stacks[pooling] = heads.to(evaluated.device)
        top1 = self.trained(evaluated, list(stacks.values()), layer)
        best = {}
        for (pooling, stack), own in zip(stacks.items(), top1, strict=True):
            index = max(range(len(stack)), key=own.__getitem__)
            scores = partial(self.scores, stack.only(index), layer=layer)
            rate = sorted(self.rates)[index]
            note = f"rate {rate:g}{at_edge(rate, self.rates)}"
            if len(self.rates) > 1 and len(set(own)) == 1:
                note = f"rate {rate:g}, all rates alike"
            best[pooling] = Chosen(train.layers[layer], own[index], scores, note)
        return best
