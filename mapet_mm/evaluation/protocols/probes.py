"""Training of classifiers on frozen features: batches in random order, all learning rates in one pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from mapet_mm.evaluation.features import Features
from mapet_mm.evaluation.image_sets import ImageSet
from mapet_mm.evaluation.protocol import Classification, Evaluated, held_out

WINDOW_BYTES = 2**29  # of features in memory


def shuffled_batches(
    bank: Features,
    kind: str,
    batch_size: int,
    epochs: int,
    layer: int = -1,
    without: Bool[Tensor, " image"] | None = None,
) -> Iterator[tuple[Tensor, Int64[Tensor, " batch"]]]:
    """Batches of features `(b, S D)` or `(b, N, D)` in float32, and labels, in random order.

    Blocks are drawn in random order into a window, and images in random order from it; a set that fits into
    one window is read once. The last batch of a window may be smaller. The images of `without` are left out.
    """
    first = bank.read(kind, 0, layer)
    blocks_at_once = max(1, WINDOW_BYTES // (first.numel() * first.element_size()))
    window = None  # the blocks whose values are held
    values = None
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(epoch)
        for drawn in torch.randperm(bank.num_blocks, generator=generator).split(blocks_at_once):
            blocks = sorted(drawn.tolist())
            if blocks != window:
                values = None  # frees the window before the next one is read
                values = torch.cat([bank.read(kind, block, layer) for block in blocks])
                images = torch.cat([torch.arange(len(bank))[bank.rows(block)] for block in blocks])
                labels = bank.labels[images]
                kept = torch.arange(len(images))
                if without is not None:
                    kept = kept[~without[images]]
                window = blocks
            order = kept[torch.randperm(len(kept), generator=generator)]
            for rows in order.split(batch_size):
                yield values[rows].float(), labels[rows]


def warmed_cosine(step: int, total: int, warmup: float) -> float:
    """Half a cosine from 1 to 0, below a straight line from 0 to 1 in the first steps."""
    cosine = (1 + math.cos(math.pi * min(1, step / total))) / 2
    rise = (step + 1) / max(1, int(total * warmup))
    return min(rise, cosine)


@dataclass(eq=False)
class TrainedProbe(Classification):
    """A protocol that trains heads at several rates, which fall along a cosine, on nine tenths of `train`.

    The other tenth chooses between the heads, and `val` is only reported. Subclasses have an `optimizer` of
    the heads' parameter groups.

    Args:
        rates: swept in one pass, for a batch of 256; each is in proportion to the batch.
        epochs: passes over the features.
        least_steps: lower bound on the number of steps, for small sets.
        batch_size: images of a step.
    """

    rates: Sequence[float]
    epochs: int = 10
    least_steps: int = 600
    batch_size: int = 256

    kind: ClassVar[str]
    warmup: ClassVar[float] = 0.0  # share of the steps in which the rates rise

    def check(self, images: Mapping[str, ImageSet]) -> None:
        """Raise ImageSetError for labels that do not suit, or if no image can be held out."""
        super().check(images)
        held_out(images["train"].labels)

    def groups(self, head: nn.Module, rate: float) -> list[dict]:
        """Parameter groups of a head."""
        return [{"params": [*head.parameters()], "lr": rate * self.batch_size / 256}]

    def trained(
        self, evaluated: Evaluated, heads: Sequence[nn.Module], groups: list[dict], layer: int = -1
    ) -> list[float]:
        """Train each head, as if alone; return the top-1 of each, in percent, on the images that choose."""
        train = evaluated.features["train"]
        chooses = held_out(train.labels)
        steps_per_epoch = math.ceil(int((~chooses).sum()) / self.batch_size)
        epochs = max(self.epochs, math.ceil(self.least_steps / steps_per_epoch))
        total = epochs * steps_per_epoch
        optimizer = self.optimizer(groups)
        scale = partial(warmed_cosine, total=total, warmup=self.warmup)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
        batches = shuffled_batches(train, self.kind, self.batch_size, epochs, layer, chooses)
        for values, labels in tqdm(batches, f"{len(heads)} probes", total=total, delay=2):
            values = values.to(evaluated.device)
            labels = labels.to(evaluated.device)
            optimizer.zero_grad()
            for head in heads:
                F.cross_entropy(head(values), labels).backward()
            optimizer.step()
            schedule.step()
        return self.top1_on(train, chooses, heads, layer)

    @torch.no_grad()
    def top1_on(
        self, train: Features, chooses: Bool[Tensor, " image"], heads: Sequence[nn.Module], layer: int
    ) -> list[float]:
        """Top-1 of each head in percent on some images, in one pass over the features."""
        device = next(heads[0].parameters()).device
        right = torch.zeros(len(heads), dtype=torch.int64, device=device)
        for rows, values in train.blocks(self.kind, layer):
            own = chooses[rows]
            values = values[own].to(device)
            labels = train.labels[rows][own].to(device)
            right += torch.stack([(head(values).argmax(1) == labels).sum() for head in heads])
        return (100 * right.double() / int(chooses.sum())).tolist()

    @torch.no_grad()
    def scores(self, head: nn.Module, bank: Features, layer: int = -1) -> Float[Tensor, "image class"]:
        """A head's logits of a set's images."""
        device = next(head.parameters()).device
        return torch.cat([head(values.to(device)) for _, values in bank.blocks(self.kind, layer)])
