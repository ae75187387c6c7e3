"""Linear probes of every layer, pooling and learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mapet_mm.evaluation.protocol import PROTOCOLS, Evaluated, Row
from mapet_mm.evaluation.protocols.probes import TrainedProbe

# Thirteen, as DINOv2's, but up to 100 instead of 0.1: the values of layers without a norm may be small.
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class LinearHead(nn.Linear):
    """A classifier of one pooling, with the same start whichever others are trained.

    Args:
        columns: of the pooling.
        num_classes: number of classes.
    """

    def __init__(self, columns: slice, num_classes: int) -> None:
        super().__init__(columns.stop - columns.start, num_classes)
        self.columns = columns
        start = torch.randn(self.weight.shape, generator=torch.Generator().manual_seed(0))
        self.weight.data.copy_(start * 0.01)
        self.bias.data.zero_()

    def forward(self, values: Float[Tensor, "batch width"]) -> Float[Tensor, "batch class"]:
        """Logits."""
        return super().forward(values[:, self.columns])


@PROTOCOLS.register_module()
@dataclass(eq=False)
class LinearProbes(TrainedProbe):
    """Linear classifiers of every layer and pooling, trained by SGD, with rates swept as DINOv2 does.

    The reported rate and layer are the best on the `val` images, as there. One layer's classifiers are
    trained at a time. Rates are for a batch of 256; each is in proportion to the batch.
    """

    rates: Sequence[float] = RATES

    kind = "pooled"

    def optimizer(self, groups: list[dict]) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(groups, momentum=0.9, weight_decay=self.weight_decay)

    def run(self, evaluated: Evaluated) -> list[Row]:
        """Rows of the last layer and of the best one, for each pooling; of all layers in detail."""
        train, _, num_classes = self.labelled(evaluated)
        details: dict[str, list[Row]] = {pooling: [] for pooling in train.poolings}
        tried = list(product(train.poolings, self.rates))
        rates = [rate * self.batch_size / 256 for _, rate in tried]
        for layer, name in enumerate(train.layers):
            heads = [LinearHead(train.columns(pooling), num_classes) for pooling, _ in tried]
            found = dict(zip(tried, self.top1(evaluated, heads, rates, layer), strict=True))
            for pooling, rows in details.items():
                top1, note = _best({rate: found[pooling, rate] for rate in self.rates})
                rows.append(Row("linear", f"{pooling}, layer {name}", top1, note=note, detail=True))
        rows = []
        for pooling, layers in details.items():
            last, best = layers[-1], max(layers, key=lambda row: row.value)
            note = f"{best.setting.removeprefix(f'{pooling}, ')}, {best.note}"
            rows.append(Row("linear", f"{pooling}, last layer", last.value, note=last.note))
            rows.append(Row("linear", f"{pooling}, best layer", best.value, note=note))
            rows += layers
        return rows


def _best(top1: Mapping[float, float]) -> tuple[float, str]:
    """The highest top-1 and its rate, of equals the lowest; the note says if other rates may be better."""
    best, rate = max((value, -rate) for rate, value in top1.items())
    note = f"rate {-rate:g}"
    if len(top1) == 1:
        return best, note
    if best == min(top1.values()):
        return best, f"{note}, all rates alike"
    ends = {min(top1): ", the lowest of the sweep", max(top1): ", the highest of the sweep"}
    return best, note + ends.get(-rate, "")
