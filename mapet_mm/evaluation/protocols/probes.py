"""Training of classifiers on frozen features: batches in random order, all learning rates as one product."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from mapet_mm.evaluation.features import Features
from mapet_mm.evaluation.images import ImageSet
from mapet_mm.evaluation.protocol import Evaluated
from mapet_mm.evaluation.protocols.classification import Classification, held_out

WINDOW_BYTES = 2**29  # of features in memory


def shuffled_batches(
    features: Features,
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
    first = features.read(kind, 0, layer)
    blocks_at_once = max(1, WINDOW_BYTES // (first.numel() * first.element_size()))
    window = None  # the blocks whose values are held
    values = None
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(epoch)
        for drawn in torch.randperm(features.num_blocks, generator=generator).split(blocks_at_once):
            blocks = sorted(drawn.tolist())
            if blocks != window:
                values = None  # frees the window before the next one is read
                values = torch.cat([features.read(kind, block, layer) for block in blocks])
                images = torch.cat([torch.arange(len(features))[features.rows(block)] for block in blocks])
                labels = features.labels[images]
                kept = torch.arange(len(images))
                if without is not None:
                    kept = kept[~without[images]]
                window = blocks
            order = kept[torch.randperm(len(kept), generator=generator)]
            for rows in order.split(batch_size):
                yield values[rows].float(), labels[rows]


class StackedHeads(nn.Module):
    """Classifiers of one shape that are computed as one product; each learns what it would learn alone.

    Subclasses have parameters whose first dimension is the head, and a `forward` from a batch of features to
    logits `(head, batch, class)`.

    Args:
        rates: learning rate of each head.
        decays: weight decay of each head, of parameters without "bias" in their names; none by default.
    """

    def __init__(self, rates: Sequence[float], decays: Sequence[float] | None = None) -> None:
        super().__init__()
        self.register_buffer("rates", torch.tensor(rates))
        self.register_buffer("decays", torch.tensor(decays) if decays else None)

    def __len__(self) -> int:
        return len(self.rates)

    def only(self, index: int) -> StackedHeads:
        """One head, without the memory of the others."""
        single = copy.deepcopy(self)
        for value in (*single.parameters(), *single.buffers()):
            value.data = value.data[index : index + 1].clone()
        return single


class Steps:
    """Steps of torch's optimizer for stacked heads, each times its head's rate.

    The optimizer finds the steps at rate 1, which are in proportion to the rate in SGD and in AdamW.

    Args:
        stacks: the heads.
        optimizer: of a list of parameters and a rate.
    """

    def __init__(
        self, stacks: Sequence[StackedHeads], optimizer: Callable[..., torch.optim.Optimizer]
    ) -> None:
        self.parameters = []
        for stack in stacks:
            for name, value in stack.named_parameters():
                decays = None if "bias" in name else stack.decays
                self.parameters.append((value, stack.rates, decays))
        self.moves = [nn.Parameter(torch.zeros_like(value)) for value, *_ in self.parameters]
        self.optimizer = optimizer(self.moves, lr=1.0)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Move all heads against their gradients, by `scale` times their rates, and clear the gradients."""
        for move, (value, *_) in zip(self.moves, self.parameters, strict=True):
            move.zero_()
            move.grad = value.grad
        self.optimizer.step()
        for move, (value, rates, decays) in zip(self.moves, self.parameters, strict=True):
            by_head = (-1, *[1] * (value.ndim - 1))
            rates = scale * rates.view(by_head)
            if decays is not None:
                value.mul_(1 - rates * decays.view(by_head))
            value.addcmul_(rates, move)
            value.grad = None


@dataclass(eq=False)
class TrainedProbe(Classification):
    """A protocol that trains heads at several rates, which fall along a cosine, on nine tenths of `train`.

    The other tenth chooses between the heads, and `val` is only reported. Subclasses have an `optimizer`.

    Args:
        rates: swept in one pass, for a batch of 256; each is in proportion to the batch.
        epochs: passes over the features.
        least_steps: lower bound on the number of steps, for small sets.
        batch_size: images of a step.
    """

    rates: Sequence[float] = ()
    epochs: int = 10
    least_steps: int = 600
    batch_size: int = 256

    warmup: ClassVar[float] = 0.0  # share of the steps in which the rates rise

    def unfit(self, images: Mapping[str, ImageSet], features: Mapping[str, Features]) -> str | None:
        """Labels that do not suit, or no image that can be held out."""
        reason = super().unfit(images, features)
        held_out(images["train"].labels, images["train"].groups)
        return reason

    def takes(self, features: Mapping[str, Features]) -> None:
        """It trains for minutes."""

    def optimizer(self, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """The optimizer whose steps the heads take."""
        raise NotImplementedError

    def trained(
        self, evaluated: Evaluated, stacks: Sequence[StackedHeads], layer: int = -1
    ) -> list[list[float]]:
        """Train heads in one pass, each as if alone.

        Returns:
            Of each stack, the top-1 of its heads, in percent, on the images that choose.
        """
        train = evaluated.features["train"]
        chooses = held_out(train.labels, evaluated.images["train"].groups)
        steps_per_epoch = math.ceil(int((~chooses).sum()) / self.batch_size)
        epochs = max(self.epochs, math.ceil(self.least_steps / steps_per_epoch))
        total = epochs * steps_per_epoch
        weights = evaluated.class_weights
        if weights is not None:
            weights = weights.to(evaluated.device)
        steps = Steps(stacks, self.optimizer)
        batches = shuffled_batches(train, self.kind, self.batch_size, epochs, layer, chooses)
        num_heads = sum(len(stack) for stack in stacks)
        for step, (values, labels) in enumerate(tqdm(batches, f"{num_heads} probes", total=total, delay=2)):
            values = values.to(evaluated.device)
            labels = labels.to(evaluated.device)
            for stack in stacks:
                logits = stack(values)  # head batch class
                of_heads = labels.expand(len(logits), -1)
                losses = F.cross_entropy(logits.flatten(0, 1), of_heads.flatten(), weights, reduction="none")
                losses.unflatten(0, of_heads.shape).mean(1).sum().backward()
            # Half a cosine from 1 to 0, below a straight line from 0 to 1 in the first steps.
            cosine = (1 + math.cos(math.pi * min(1, step / total))) / 2
            rise = (step + 1) / max(1, int(total * self.warmup))
            steps.step(min(rise, cosine) * self.batch_size / 256)
        return self.top1_on(evaluated, chooses, stacks, layer)

    @torch.no_grad()
    def top1_on(
        self,
        evaluated: Evaluated,
        chooses: Bool[Tensor, " image"],
        stacks: Sequence[StackedHeads],
        layer: int,
    ) -> list[list[float]]:
        """Top-1 of each head in percent on some images of `train`, in one pass over the features."""
        train = evaluated.features["train"]
        counted = torch.ones(len(train), dtype=torch.float64)
        if evaluated.class_weights is not None:
            counted = evaluated.class_weights.double()[train.labels]
        right = [torch.zeros(len(stack), dtype=torch.float64) for stack in stacks]
        for rows, values in train.blocks(self.kind, layer):
            own = chooses[rows]
            values = values[own].to(stacks[0].rates.device)
            for stack, counts in zip(stacks, right, strict=True):
                is_right = stack(values).argmax(2).cpu() == train.labels[rows][own]
                counts += is_right.double() @ counted[rows][own]
        return [(100 * counts / counted[chooses].sum()).tolist() for counts in right]

    @torch.no_grad()
    def scores(self, head: StackedHeads, features: Features, layer: int = -1) -> Float[Tensor, "image class"]:
        """Logits of a set's images, of a stack of one head."""
        device = head.rates.device
        return torch.cat([head(values.to(device))[0] for _, values in features.blocks(self.kind, layer)])
