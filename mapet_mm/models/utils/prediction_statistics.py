"""Sums over the predictions of a token prediction head, kept on the device until somebody asks."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from mmengine.dist import all_reduce
from torch import Tensor


class PredictionStatistics:
    """Hits by place, and how often each token was predicted and a target; nothing waits for the device.

    Images whose latents are not finite are left out: one of them would make the sums of all not finite.
    `num_places` are those of the permuted order, for batches in which only some of them are predicted.
    """

    def __init__(self, vocab_size: int, num_places: int | None = None) -> None:
        self.vocab_size, self.num_places = vocab_size, num_places
        self.reset()

    def reset(self) -> None:
        """Forget what was added."""
        self._places = self._counts = self.gram = None

    @torch.no_grad()
    def add(
        self,
        latents: Float[Tensor, "batch target dim"],
        predictions: Int64[Tensor, "batch target"],
        tokens: Int64[Tensor, "batch target"],
        places: Int64[Tensor, " target"] | None = None,
    ) -> None:
        """Add a batch in permuted order; `places` are the targets' among all, None if all are predicted."""
        num_places = predictions.shape[1] if places is None else self.num_places
        if self._places is None or self._places.shape[1] != num_places:
            self._places = tokens.new_zeros(2, num_places)  # hits, and how many could be
            self._counts = tokens.new_zeros(2, self.vocab_size)
            # `X^T X` of the images' mean latents, for their effective rank.
            self.gram = latents.new_zeros(latents.shape[-1], latents.shape[-1], dtype=torch.float32)
        means = latents.mean(1).float()  # B D
        finite = means.isfinite().all(1, keepdim=True)  # B 1
        counted = finite.expand_as(tokens)
        hits = torch.stack([(predictions == tokens) & counted, counted]).sum(1)  # 2 n
        if places is None:
            self._places += hits
        else:
            self._places.index_add_(1, places, hits)
        both = torch.stack([predictions.flatten(), tokens.flatten()])
        self._counts.scatter_add_(1, both, counted.flatten().to(both).expand_as(both))
        means = means.where(finite, 0)
        with torch.autocast(means.device.type, enabled=False):  # whose rounding would add directions
            self.gram += means.T @ means

    def reduce(self) -> None:
        """Add up what all processes have added; each of them has to call it."""
        if self._places is not None:
            for sums in (self._places, self._counts, self.gram):
                all_reduce(sums)

    @property
    def empty(self) -> bool:
        """True until an image counts."""
        return self._places is None or not self._places.any()

    def accuracy_by_place(self, bins: int) -> dict[int, float]:
        """Token accuracy in percent by part of the permuted order, numbered from 1, if it has predictions."""
        parts = self._places.cpu().tensor_split(min(bins, self._places.shape[1]), dim=1)
        sums = {number: part.sum(1).tolist() for number, part in enumerate(parts, 1)}
        return {number: 100 * hits / all_ for number, (hits, all_) in sums.items() if all_}

    def effective_tokens(self) -> tuple[float, float]:
        """Exponential of the entropy (nats) of predictions and of targets, each 1 to V."""
        shares = self._counts / self._counts.sum(1, keepdim=True)
        predicted, targets = torch.special.entr(shares).sum(1).exp().tolist()
        return predicted, targets
