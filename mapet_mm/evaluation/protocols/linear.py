"""Linear probes of every layer, pooling and learning rate, trained together in one pass over the features."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from mapet_mm.evaluation.batches import ShuffledBatches
from mapet_mm.evaluation.features import POOLINGS, Features
from mapet_mm.evaluation.protocol import PROTOCOLS, Classification, Evaluated, Row, say_what_lacks
from mapet_mm.visualization.report import Section

# Weights, gradients and two moments of the classifiers that are trained at once.
MEMORY_BYTES = 2**30
# Thirteen, as DINOv2's, but up to 100 instead of 0.1: the values of layers without a norm may be small.
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Probe(NamedTuple):
    """One linear classifier: what it sees, and at which rate it learns, for a batch of 256."""

    layer: int
    pooling: str
    rate: float


class Bank(nn.Module):
    """Classifiers of one layer and pooling, with several rates.

    Args:
        probes: the classifiers.
        width: of the features.
        num_classes: number of classes.
    """

    def __init__(self, probes: Sequence[Probe], width: int, num_classes: int) -> None:
        super().__init__()
        self.probes, self.layer, self.pooling = list(probes), probes[0].layer, probes[0].pooling
        # The same start for all, whoever else is trained: a classifier becomes what it would alone.
        start = torch.randn(num_classes, width, generator=torch.Generator().manual_seed(0)) * 0.01
        self.weight = nn.Parameter(start.repeat(len(probes), 1, 1))
        self.bias = nn.Parameter(torch.zeros(len(probes), num_classes))
        self.register_buffer("rates", torch.tensor([probe.rate for probe in probes]))

    def forward(self, features: Float[Tensor, "batch width"]) -> Float[Tensor, "rate batch class"]:
        """Logits of each classifier."""
        logits = F.linear(features, self.weight.flatten(0, 1), self.bias.flatten())  # B (R C)
        return logits.unflatten(1, self.bias.shape).transpose(0, 1)


def train_probes(
    batches: ShuffledBatches,
    probes: Sequence[Probe],
    num_classes: int,
    epochs: int,
    optimizer: str = "SGD",
    weight_decay: float = 0.0,
    device: torch.device | str = "cpu",
) -> list[Bank]:
    """Train classifiers together, each as it would be trained alone; rates fall to 0 along a cosine.

    Args:
        batches: of the training images' pooled features.
        probes: the classifiers.
        num_classes: number of classes.
        epochs: passes over the features.
        optimizer: 'SGD' (momentum 0.9) or 'AdamW'.
        weight_decay: AdamW's.
        device: where to train.
    """
    alone = optimizer == "AdamW"  # whose steps do not follow the loss's scale
    banks = []
    key = (lambda probe: probe) if alone else (lambda probe: probe[:2])
    for _, some in groupby(sorted(probes), key=key):
        some = list(some)
        width = batches.features.dim * (2 if some[0].pooling == "both" else 1)
        banks.append(Bank(some, width, num_classes).to(device))
    total, scale = epochs * batches.steps, batches.batch_size / 256
    groups = [
        {"params": bank.parameters(), "lr": scale * (bank.probes[0].rate if alone else 1)} for bank in banks
    ]
    if alone:
        steps = torch.optim.AdamW(groups, weight_decay=weight_decay)
    else:
        steps = torch.optim.SGD(groups, momentum=0.9)
    cosine = torch.optim.lr_scheduler.LambdaLR(steps, partial(half_cosine, total=total))
    for epoch in tqdm(range(epochs), desc=f"{len(probes)} linear probes", delay=2):
        for values, labels in batches.epoch(epoch):
            _step(banks, batches.features, values.to(device), labels.to(device), alone)
            steps.step()
            steps.zero_grad()
            cosine.step()
    return banks


def parts(probes: Sequence[Probe], dim: int, num_classes: int) -> Iterator[list[Probe]]:
    """Classifiers that are trained at once: as many as `MEMORY_BYTES` take, in order."""
    part, used = [], 0
    for probe in sorted(probes):
        size = 16 * num_classes * (1 + dim * (2 if probe.pooling == "both" else 1))
        if part and used + size > MEMORY_BYTES:
            yield part
            part, used = [], 0
        part.append(probe)
        used += size
    yield part


def check_rates(rates: Sequence[float]) -> None:
    """Raise ValueError unless there are learning rates, all above 0."""
    if not rates or min(rates) <= 0:
        raise ValueError(f"rates={list(rates)}: at least one learning rate, each above 0")


def half_cosine(step: int, total: int) -> float:
    """From 1 at step 0 to 0 at `total`."""
    return (1 + math.cos(math.pi * min(1, step / total))) / 2


def _step(banks: Sequence[Bank], features: Features, values: Tensor, labels: Tensor, alone: bool) -> None:
    for bank in banks:
        logits = bank(features.pool(values[:, bank.layer], bank.pooling))  # R B C
        losses = F.cross_entropy(logits.flatten(0, 1), labels.repeat(len(logits)), reduction="none")
        losses = losses.view(len(logits), -1).mean(1)  # R
        # A rate times the loss is a rate of its own, for SGD without decay.
        (losses.sum() if alone else losses @ bank.rates).backward()


@torch.no_grad()
def accuracies(
    banks: Sequence[Bank], features: Features, device: torch.device | str = "cpu"
) -> dict[Probe, float]:
    """Top-1 in percent of each classifier."""
    right = [torch.zeros(len(bank.rates), device=device) for bank in banks]
    for rows, values in features.blocks("pooled"):
        values, labels = values.to(device), features.labels[rows].to(device)
        for bank, count in zip(banks, right, strict=True):
            logits = bank(features.pool(values[:, bank.layer], bank.pooling))
            count += (logits.argmax(2) == labels).sum(1)
    probes = [probe for bank in banks for probe in bank.probes]
    counts = [number for count in right for number in count.tolist()]
    return {probe: 100 * number / len(features) for probe, number in zip(probes, counts, strict=True)}


@PROTOCOLS.register_module()
class LinearProbes(Classification):
    """Linear classifiers of every layer and pooling, with learning rates swept as DINOv2 does.

    The reported rate and layer are those that classify the `val` images best, as there.

    Args:
        rates: for a batch of 256; each is in proportion to the batch.
        epochs: passes over the features, but
        least_steps: at least so many steps, for small sets.
        batch_size: images of a step.
        optimizer: 'SGD' or 'AdamW'.
        weight_decay: AdamW's.
        poolings: of 'class token', 'mean' and 'both'; all by default.
        seed: of the order of the images.
    """

    name = "linear"

    def __init__(
        self,
        rates: Sequence[float] = RATES,
        epochs: int = 10,
        least_steps: int = 600,
        batch_size: int = 256,
        optimizer: str = "SGD",
        weight_decay: float = 0.0,
        poolings: Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        if optimizer not in ("SGD", "AdamW"):
            raise ValueError(f"optimizer={optimizer!r} is none of SGD, AdamW")
        check_rates(rates)
        if poolings is not None and (not poolings or not set(poolings) <= set(POOLINGS)):
            raise ValueError(f"poolings={poolings!r}: a list of some of {', '.join(POOLINGS)}")
        self.rates, self.batch_size = list(rates), batch_size
        self.epochs, self.least_steps = epochs, least_steps
        self.optimizer, self.weight_decay, self.poolings, self.seed = optimizer, weight_decay, poolings, seed

    def layers(self, features: Features) -> list[int]:
        """The probed layers."""
        return list(range(len(features.layers)))

    def run(self, evaluated: Evaluated) -> list[Row]:
        """Rows of the last layer and of the best one, for each pooling; of all layers in detail.

        None of a backbone that has none of the poolings.
        """
        train, val, num_classes = self.labelled(evaluated)
        layers = self.layers(train)
        poolings = [one for one in train.poolings if self.poolings is None or one in self.poolings]
        if not poolings:
            say_what_lacks(self.name, self.poolings, train)
            return []
        probes = [
            Probe(layer, pooling, rate) for layer in layers for pooling in poolings for rate in self.rates
        ]
        batches = ShuffledBatches(train, "pooled", self.batch_size, self.seed)
        epochs = batches.epochs(self.epochs, self.least_steps)
        options = epochs, self.optimizer, self.weight_decay, evaluated.device
        found = {}
        for part in parts(probes, train.dim, num_classes):
            found |= accuracies(train_probes(batches, part, num_classes, *options), val, evaluated.device)
        rows = []
        for pooling in poolings:
            details = []
            for layer in layers:
                top1, note = self._best({rate: found[Probe(layer, pooling, rate)] for rate in self.rates})
                setting = f"{pooling}, layer {train.layers[layer]}"
                details.append(Row(self.name, setting, top1, note=note, detail=True))
            last, best = details[-1], max(details, key=lambda row: row.value)
            rows.append(Row(self.name, f"{pooling}, last layer", last.value, note=last.note))
            note = f"{best.setting.removeprefix(f'{pooling}, ')}, {best.note}"
            rows += [Row(self.name, f"{pooling}, best layer", best.value, note=note), *details]
        return rows

    @staticmethod
    def _best(top1: Mapping[float, float]) -> tuple[float, str]:
        """The highest top-1, and its rate, of equals the lowest, with a word where others may be better."""
        best, rate = max((value, -rate) for rate, value in top1.items())
        note = f"rate {-rate:g}"
        if len(top1) == 1:
            return best, note
        if best == min(top1.values()):
            return best, f"{note}, all rates alike"
        ends = {min(top1): ", the lowest of the sweep", max(top1): ", the highest of the sweep"}
        return best, note + ends.get(-rate, "")

    def sections(self, evaluated: Evaluated, rows: Sequence[Row]) -> list[Section]:
        """Accuracy by layer."""
        if not rows:
            return []
        figure = Figure(figsize=(6, 3.2), layout="constrained")
        axes = figure.subplots()
        layers = evaluated.features["train"].layers
        lines: dict[str, list[tuple[str, float]]] = {}
        for row in rows:
            if row.detail:
                pooling, _, layer = row.setting.rpartition(", layer ")
                lines.setdefault(pooling, []).append((layer, row.value))
        for pooling, points in lines.items():
            axes.plot(
                [layers.index(layer) for layer, _ in points], [v for _, v in points], "o-", label=pooling
            )
        axes.set_xticks(range(len(layers)), layers)
        axes.set_xlabel("layer")
        axes.set_ylabel("top-1, %")
        axes.grid(alpha=0.3)
        axes.legend()
        name = evaluated.checkpoint.name if evaluated.checkpoint else ""
        return [
            Section(f"Linear probe by layer ({self.name}): {name}", "At each layer's best rate.", [figure])
        ]


@PROTOCOLS.register_module()
class BEiTLinearProbes(LinearProbes):
    """BEiT's linear probe: class token and patch mean of each numbered layer, without a norm, at one rate.

    Rate, decay and epochs are those of `run_linear_eval.py`; what is left out is its random crops and flips,
    for features are computed once.

    Args:
        rates: for a batch of 256; BEiT's is 4e-3 for 1024.
        **kwargs: see `LinearProbes`.
    """

    name = "linear, BEiT's"

    def __init__(self, rates: Sequence[float] = (1e-3,), epochs: int = 50, **kwargs) -> None:
        options = {"optimizer": "AdamW", "weight_decay": 1e-4, "poolings": ["both"], "batch_size": 1024}
        super().__init__(rates, epochs, **{**options, "least_steps": 1000, **kwargs})

    def layers(self, features: Features) -> list[int]:
        """The numbered layers; the output of a backbone without any."""
        numbered = [place for place, layer in enumerate(features.layers) if layer != "output"]
        return numbered or super().layers(features)
