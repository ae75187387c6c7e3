"""Features in random order, of which a part at a time is in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Int64
from torch import Tensor

from mapet_mm.evaluation.features import Features

WINDOW_BYTES = 2**29


class ShuffledBatches:
    """Batches of a set's features and labels, in an order that the seed and the epoch decide.

    Blocks are drawn in random order into a window, and images in random order from it; a set that fits into
    one window is read once.

    Args:
        features: labelled.
        kind: 'pooled' or 'tokens'.
        batch_size: images; the last batch of a window may have fewer.
        seed: of the order.
    """

    def __init__(self, features: Features, kind: str, batch_size: int, seed: int = 0) -> None:
        self.features, self.kind, self.batch_size, self.seed = features, kind, batch_size, seed
        first = features.read(kind, 0)
        self._axis = 2 if kind == "pooled" else 0
        self._window = max(1, WINDOW_BYTES // (first.numel() * first.element_size()))
        self._held: tuple[list[int], Tensor, Tensor] | None = None

    @property
    def steps(self) -> int:
        """Batches of an epoch, if all windows were as large as the first."""
        return -(-len(self.features) // self.batch_size)

    def epochs(self, wanted: int, least_steps: int) -> int:
        """The epochs that are wanted, or more if these have fewer than `least_steps` batches."""
        return max(wanted, -(-least_steps // self.steps))

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Int64[Tensor, " batch"]]]:
        """Features in float32, `(P, L, b, D)` or `(b, N, D)`, and labels."""
        generator = torch.Generator().manual_seed(1000003 * self.seed + number)
        for blocks in torch.randperm(self.features.num_blocks, generator=generator).split(self._window):
            values, labels = self._load(sorted(blocks.tolist()))
            for rows in torch.randperm(len(labels), generator=generator).split(self.batch_size):
                yield values.index_select(self._axis, rows).float(), labels[rows]

    def _load(self, blocks: list[int]) -> tuple[Tensor, Tensor]:
        if self._held is None or self._held[0] != blocks:
            self._held = None  # before the next one is read
            labels = torch.cat([self.features.labels[self.features.rows(block)] for block in blocks])
            values, start = None, 0
            for block in blocks:  # into place: a window and its parts would be two
                part = self.features.read(self.kind, block)
                if values is None:
                    shape = list(part.shape)
                    shape[self._axis] = len(labels)
                    values = part.new_empty(shape)
                if part.dtype != values.dtype:  # of one in float16, others in float32
                    values = values.float()
                length = part.shape[self._axis]
                values.narrow(self._axis, start, length).copy_(part)
                start += length
            self._held = blocks, values, labels
        return self._held[1:]
