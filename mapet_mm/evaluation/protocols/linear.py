"""Linear classifiers of every layer and pooling, trained by SGD."""

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


class LayerProbe(Classification):
    """Classifiers of the last `layers` layers, all by default, each of one pooling.

    Held-out images choose each classifier's setting, and the layer. Subclasses have `best_of_layer`.
    """

    layers = None

    def best_of_layer(self, evaluated: Evaluated, layer: int) -> dict[str, Chosen]:
        """A layer's classifiers, by pooling.

        Args:
            evaluated: features and images.
            layer: its index among the features' layers.
        """
        raise NotImplementedError

    def rows(self, evaluated: Evaluated) -> list[Row]:
        """Rows of the last layer and of the best one, for each pooling; of all layers in detail."""
        train = evaluated.features["train"]
        num_last = self.layers or len(train.layers)
        chosen: dict[str, list[Chosen]] = {pooling: [] for pooling in train.settings}
        for layer in range(len(train.layers))[-num_last:]:
            for pooling, classifier in self.best_of_layer(evaluated, layer).items():
                chosen[pooling].append(classifier)
        rows = []
        for pooling, classifiers in chosen.items():
            rows += self.rows_of_layers(evaluated, pooling, classifiers)
        return rows

    def rows_of_layers(self, evaluated: Evaluated, pooling: str, chosen: Sequence[Chosen]) -> list[Row]:
        """Rows of the last layer, of the best one if there are several, and of each in detail.

        The best layer is the one that classifies the held-out images best, of equals the first.
        """
        last = chosen[-1]
        rows = self.rows_of(evaluated, f"{pooling}, last layer", last.scores, note=last.note)
        if len(chosen) > 1:
            best = max(chosen, key=lambda one: one.top1)
            note = f"layer {best.layer}, {best.note}"
            rows += self.rows_of(evaluated, f"{pooling}, best layer", best.scores, note=note)
        for one in chosen:
            setting = f"{pooling}, layer {one.layer}"
            rows += self.rows_of(evaluated, setting, one.scores, note=one.note, detail=True)
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
class LinearProbes(LayerProbe, TrainedProbe):
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

    def best_of_layer(self, evaluated: Evaluated, layer: int) -> dict[str, Chosen]:
        """Each pooling's head with the best rate on the held-out images, of equals the lowest."""
        train, _, num_classes = self.labelled(evaluated)
        # All poolings and rates are trained in one pass.
        stacks = {}
        for pooling in train.settings:
            heads = LinearHeads(train.columns(pooling), num_classes, sorted(self.rates))
            stacks[pooling] = heads.to(evaluated.device)
        top1 = self.trained(evaluated, list(stacks.values()), layer)
        best = {}
        for (pooling, stack), own in zip(stacks.items(), top1, strict=True):
            index = max(range(len(stack)), key=own.__getitem__)
            scores = partial(self.scores, stack.only(index), layer=layer)
            best[pooling] = Chosen(train.layers[layer], own[index], scores, self.note(index, own))
        return best

    def note(self, index: int, top1: Sequence[float]) -> str:
        """The rate that was chosen, by the figures of all, the lowest rate's first."""
        rate = sorted(self.rates)[index]
        if len(self.rates) > 1 and len(set(top1)) == 1:
            return f"rate {rate:g}, all rates alike"
        return f"rate {rate:g}{at_edge(rate, self.rates)}"
