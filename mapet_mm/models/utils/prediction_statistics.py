"""Sums over the predictions of a token prediction head, kept on the device until somebody asks."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from mmengine.dist import all_reduce
from torch import Tensor


class PredictionStatistics:
    """How often each token was predicted and a target, and the latents' spread; nothing waits for the device.

    Images whose latents are not finite are left out: one of them would make the sums of all not finite.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.reset()

    def reset(self) -> None:
        """Forget what was added."""
        self._counts = self.gram = None

    @torch.no_grad()
    def add(
        self,
        latents: Float[Tensor, "batch target dim"],
        predictions: Int64[Tensor, "batch target"],
        tokens: Int64[Tensor, "batch target"],
    ) -> None:
        """Add a batch."""
        if self._counts is None:
            self._counts = tokens.new_zeros(2, self.vocab_size)
            # `X^T X` of the images' mean latents, for their effective rank.
            self.gram = latents.new_zeros(latents.shape[-1], latents.shape[-1], dtype=torch.float32)
        means = latents.mean(1).float()  # B D
        finite = means.isfinite().all(1, keepdim=True)  # B 1
        counted = finite.expand_as(tokens)
        both = torch.stack([predictions.flatten(), tokens.flatten()])
        self._counts.scatter_add_(1, both, counted.flatten().to(both).expand_as(both))
        means = means.where(finite, 0)
        with torch.autocast(means.device.type, enabled=False):  # whose rounding would add directions
            self.gram += means.T @ means

    def reduce(self) -> None:
        """Add up what all processes have added; each of them has to call it."""
        if self._counts is not None:
            for sums in (self._counts, self.gram):
                all_reduce(sums)

    @property
    def empty(self) -> bool:
        """True until an image counts."""
        return self._counts is None or not self._counts.any()

    def effective_tokens(self) -> tuple[float, float]:
        """Exponential of the entropy (nats) of predictions and of targets, each 1 to V."""
        shares = self._counts / self._counts.sum(1, keepdim=True)
        predicted, targets = torch.special.entr(shares).sum(1).exp().tolist()
        return predicted, targets
