"""Training of classifiers on frozen features: batches in random order, all learning rates in one pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from mapet_mm.evaluation.features import FeatureBank
from mapet_mm.evaluation.protocol import Classification, Evaluated

WINDOW_BYTES = 2**29  # of features in memory


class ShuffledBatches:
    """Batches of a set's features and labels, in an order that the seed and the epoch decide.

    Blocks are drawn in random order into a window, and images in random order from it; a set that fits into
    one window is read once.

    Args:
        bank: labelled features.
        kind: 'pooled' or 'tokens'.
        batch_size: images; the last batch of a window may have fewer.
        seed: of the order.
    """

    def __init__(self, bank: FeatureBank, kind: str, batch_size: int, seed: int = 0) -> None:
        self.bank, self.kind, self.batch_size, self.seed = bank, kind, batch_size, seed
        first = bank.read(kind, 0)
        self._axis = 1 if kind == "pooled" else 0
        self._window = max(1, WINDOW_BYTES // (first.numel() * first.element_size()))
        self._held: tuple[list[int], Tensor, Tensor] | None = None

    @property
    def steps(self) -> int:
        """Batches of an epoch, if all windows were as large as the first."""
        return -(-len(self.bank) // self.batch_size)

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Int64[Tensor, " batch"]]]:
        """Features in float32, `(L, b, S D)` or `(b, N, D)`, and labels."""
        generator = torch.Generator().manual_seed(1000003 * self.seed + number)
        for blocks in torch.randperm(self.bank.num_blocks, generator=generator).split(self._window):
            values, labels = self._load(sorted(blocks.tolist()))
            for rows in torch.randperm(len(labels), generator=generator).split(self.batch_size):
                yield values.index_select(self._axis, rows).float(), labels[rows]

    def _load(self, blocks: list[int]) -> tuple[Tensor, Tensor]:
        if self._held is None or self._held[0] != blocks:
            self._held = None  # frees the window before the next one is read
            values = torch.cat([self.bank.read(self.kind, block) for block in blocks], dim=self._axis)
            labels = torch.cat([self.bank.labels[self.bank.rows(block)] for block in blocks])
            self._held = blocks, values, labels
        return self._held[1:]


def train_heads(
    heads: Sequence[nn.Module],
    rates: Sequence[float],
    batches: ShuffledBatches,
    epochs: int,
    optimizer: Callable[[list[dict]], torch.optim.Optimizer],
    warmup: float = 0.0,
    device: torch.device | str = "cpu",
) -> None:
    """Train classifiers on the same batches, each as it would be trained alone; rates fall along a cosine.

    Args:
        heads: give logits of a batch's features.
        rates: of each head.
        batches: of the training images.
        epochs: passes over them.
        optimizer: of parameter groups.
        warmup: share of the steps in which the rates rise.
        device: where to train.
    """
    groups = [
        {"params": list(head.to(device).parameters()), "lr": rate}
        for head, rate in zip(heads, rates, strict=True)
    ]
    steps, total = optimizer(groups), epochs * batches.steps
    schedule = torch.optim.lr_scheduler.LambdaLR(steps, lambda step: warmed_cosine(step, total, warmup))
    for epoch in tqdm(range(epochs), desc=f"{len(heads)} probes", delay=2):
        for values, labels in batches.epoch(epoch):
            values, labels = values.to(device), labels.to(device)
            steps.zero_grad()
            for head in heads:
                F.cross_entropy(head(values), labels).backward()
            steps.step()
            schedule.step()


def warmed_cosine(step: int, total: int, warmup: float) -> float:
    """Half a cosine from 1 to 0, below a straight line from 0 to 1 in the first steps."""
    cosine = (1 + math.cos(math.pi * min(1, step / total))) / 2
    return min((step + 1) / max(1, int(total * warmup)), cosine)


@torch.no_grad()
def accuracies(
    heads: Sequence[nn.Module], bank: FeatureBank, kind: str, device: torch.device | str = "cpu"
) -> list[float]:
    """Top-1 in percent of each head."""
    right = torch.zeros(len(heads))
    for block in range(bank.num_blocks):
        values = bank.read(kind, block).float().to(device)
        labels = bank.labels[bank.rows(block)].to(device)
        right += torch.stack([(head(values).argmax(1) == labels).sum() for head in heads]).cpu()
    return (100 * right.double() / len(bank)).tolist()


class TrainedProbe(Classification):
    """A protocol that trains heads at several rates.

    Args:
        rates: swept in one pass.
        epochs: passes over the features.
        least_steps: lower bound on the number of steps, for small sets.
        batch_size: images of a step.
        weight_decay: the optimizer's.
        seed: of the order of the images.
    """

    kind: ClassVar[str]

    def __init__(
        self,
        rates: Sequence[float],
        epochs: int,
        least_steps: int,
        batch_size: int,
        weight_decay: float,
        seed: int,
    ) -> None:
        if not rates or min(rates) <= 0:
            raise ValueError(f"rates={list(rates)}: at least one learning rate, each above 0")
        self.rates, self.epochs, self.least_steps = list(rates), epochs, least_steps
        self.batch_size, self.weight_decay, self.seed = batch_size, weight_decay, seed

    def sweep(
        self,
        evaluated: Evaluated,
        heads: Sequence[nn.Module],
        rates: Sequence[float],
        optimizer: Callable[..., torch.optim.Optimizer],
        warmup: float = 0.0,
    ) -> list[float]:
        """Train the heads on `train`, each at its rate; their top-1 in percent on `val`."""
        batches = ShuffledBatches(evaluated.features["train"], self.kind, self.batch_size, self.seed)
        epochs = max(self.epochs, -(-self.least_steps // batches.steps))
        build = partial(optimizer, weight_decay=self.weight_decay)
        train_heads(heads, rates, batches, epochs, build, warmup, evaluated.device)
        return accuracies(heads, evaluated.features["val"], self.kind, evaluated.device)
