"""Linear probes of every layer, pooling and learning rate, trained together in one pass over the features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor, nn

from mapet_mm.evaluation.features import POOLINGS, FeatureBank
from mapet_mm.evaluation.protocol import PROTOCOLS, Evaluated, Row
from mapet_mm.evaluation.protocols.probes import TrainedProbe
from mapet_mm.utils.dist import print_once
from mapet_mm.visualization.report import Section

MEMORY_BYTES = 2**30  # weights, gradients and two moments of the classifiers trained at once
# Thirteen, as DINOv2's, but up to 100 instead of 0.1: the values of layers without a norm may be small.
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
OPTIMIZERS = {"SGD": partial(torch.optim.SGD, momentum=0.9), "AdamW": torch.optim.AdamW}


class Probe(NamedTuple):
    """One linear classifier's layer, pooling and learning rate (for a batch of 256)."""

    layer: int
    pooling: str
    rate: float


class LinearHead(nn.Linear):
    """A classifier of one layer and pooling, with the same start whichever others are trained.

    Args:
        probe: the layer and the pooling.
        bank: features of the kind that it will see.
        num_classes: number of classes.
    """

    def __init__(self, probe: Probe, bank: FeatureBank, num_classes: int) -> None:
        columns = bank.columns(probe.pooling)
        super().__init__(columns.stop - columns.start, num_classes)
        self.layer, self.columns = probe.layer, columns
        start = torch.randn(self.weight.shape, generator=torch.Generator().manual_seed(0))
        self.weight.data.copy_(start * 0.01)
        self.bias.data.zero_()

    def forward(self, values: Float[Tensor, "layer batch width"]) -> Float[Tensor, "batch class"]:
        """Logits."""
        return super().forward(values[self.layer][:, self.columns])


def parts(probes: Sequence[Probe], bank: FeatureBank, num_classes: int) -> Iterator[list[Probe]]:
    """Classifiers that are trained at once: as many as `MEMORY_BYTES` take, in order."""
    part, used = [], 0
    for probe in probes:
        columns = bank.columns(probe.pooling)
        size = 16 * num_classes * (1 + columns.stop - columns.start)
        if part and used + size > MEMORY_BYTES:
            yield part
            part, used = [], 0
        part.append(probe)
        used += size
    yield part


@PROTOCOLS.register_module()
class LinearProbes(TrainedProbe):
    """Linear classifiers of every layer and pooling, with learning rates swept as DINOv2 does.

    The reported rate and layer are the best on the `val` images, as there.

    Args:
        rates: for a batch of 256; each is in proportion to the batch.
        optimizer: 'SGD' or 'AdamW'.
        poolings: of 'class token', 'mean' and 'both'; all by default.
        epochs, least_steps, batch_size, weight_decay, seed: see `TrainedProbe`.
    """

    kind = "pooled"
    name = "linear"

    def __init__(
        self,
        rates: Sequence[float] = RATES,
        epochs: int = 10,
        least_steps: int = 600,
        batch_size: int = 256,
        optimizer: str = "SGD",
        weight_decay: float = 0.0,
        poolings: Sequence[str] = POOLINGS,
        seed: int = 0,
    ) -> None:
        super().__init__(rates, epochs, least_steps, batch_size, weight_decay, seed)
        if optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={optimizer!r}: one of {', '.join(OPTIMIZERS)}")
        if not poolings or not set(poolings) <= set(POOLINGS):
            raise ValueError(f"poolings={poolings!r}: some of {', '.join(POOLINGS)}")
        self.optimizer, self.poolings = optimizer, list(poolings)

    def layers(self, bank: FeatureBank) -> list[int]:
        """The probed layers."""
        return list(range(len(bank.layers)))

    def run(self, evaluated: Evaluated) -> list[Row]:
        """Rows of the last layer and of the best one, for each pooling; of all layers in detail."""
        train, _, num_classes = self.labelled(evaluated)
        poolings = [one for one in train.poolings if one in self.poolings]
        probes = [
            Probe(layer, pooling, rate)
            for layer in self.layers(train)
            for pooling in poolings
            for rate in self.rates
        ]
        if not probes:
            print_once(f"no {self.name}: the backbone gives {' and '.join(train.poolings)} only")
            return []
        found = {}
        for part in parts(probes, train, num_classes):
            heads = [LinearHead(probe, train, num_classes) for probe in part]
            rates = [probe.rate * self.batch_size / 256 for probe in part]
            top1 = self.sweep(evaluated, heads, rates, OPTIMIZERS[self.optimizer])
            found |= zip(part, top1, strict=True)
        return [row for pooling in poolings for row in self._rows(pooling, train, found)]

    def _rows(self, pooling: str, bank: FeatureBank, found: Mapping[Probe, float]) -> list[Row]:
        details = []
        for layer in self.layers(bank):
            top1, note = _best({rate: found[Probe(layer, pooling, rate)] for rate in self.rates})
            setting = f"{pooling}, layer {bank.layers[layer]}"
            details.append(Row(self.name, setting, top1, note=note, detail=True))
        last, best = details[-1], max(details, key=lambda row: row.value)
        note = f"{best.setting.removeprefix(f'{pooling}, ')}, {best.note}"
        return [
            Row(self.name, f"{pooling}, last layer", last.value, note=last.note),
            Row(self.name, f"{pooling}, best layer", best.value, note=note),
            *details,
        ]

    def sections(self, evaluated: Evaluated, rows: Sequence[Row]) -> list[Section]:
        """Accuracy by layer."""
        lines: dict[str, list[tuple[str, float]]] = {}
        for row in rows:
            if row.detail:
                pooling, _, layer = row.setting.rpartition(", layer ")
                lines.setdefault(pooling, []).append((layer, row.value))
        if not lines:
            return []
        figure = Figure(figsize=(6, 3.2), layout="constrained")
        axes = figure.subplots()
        for pooling, points in lines.items():
            axes.plot(*zip(*points, strict=True), "o-", label=pooling)
        axes.set(xlabel="layer", ylabel="top-1, %")
        axes.grid(alpha=0.3)
        axes.legend()
        title = f"Linear probe by layer ({self.name}): {evaluated.checkpoint.name}"
        return [Section(title, "At each layer's best rate.", [figure])]


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


@PROTOCOLS.register_module()
class BEiTLinearProbes(LinearProbes):
    """BEiT's linear probe: class token and patch mean of each numbered layer, without a norm, at one rate.

    Rate, decay and epochs come from `run_linear_eval.py`, without its random crops and flips: features are
    computed once.

    Args:
        rates: for a batch of 256; BEiT's is 4e-3 for 1024.
        **kwargs: see `LinearProbes`.
    """

    name = "linear, BEiT's"

    def __init__(self, rates: Sequence[float] = (1e-3,), epochs: int = 50, **kwargs) -> None:
        options = {"optimizer": "AdamW", "weight_decay": 1e-4, "poolings": ["both"], "batch_size": 1024}
        super().__init__(rates, epochs, **{**options, "least_steps": 1000, **kwargs})

    def layers(self, bank: FeatureBank) -> list[int]:
        """The numbered layers; the output of a backbone without any."""
        return [place for place, layer in enumerate(bank.layers) if layer != "output"] or [0]
