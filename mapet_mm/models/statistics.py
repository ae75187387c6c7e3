"""What a token prediction head has predicted since it was last asked, summed on the device."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor


class PredictionStatistics:
    """Hits by place, and how often each token was predicted and a target; nothing waits for the device.

    Args:
        vocab_size: number of visual tokens `V`.

    Attributes:
        images: how many images were added.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.reset()

    def reset(self) -> None:
        """Forget what was added."""
        self.images = 0
        self._hits = self._counts = self._gram = None

    @torch.no_grad()
    def add(
        self,
        latents: Float[Tensor, "batch target dim"],
        predictions: Int64[Tensor, "batch target"],
        tokens: Int64[Tensor, "batch target"],
    ) -> None:
        """Add a batch: what was predicted from, what was, and what the targets are, in permuted order."""
        if self._hits is None or self._hits.shape != predictions.shape[1:]:
            self.reset()
            self._hits = tokens.new_zeros(tokens.shape[1])
            self._counts = tokens.new_zeros(2, self.vocab_size)
            self._gram = latents.new_zeros(latents.shape[-1], latents.shape[-1], dtype=torch.float32)
        self.images += len(predictions)
        self._hits += (predictions == tokens).sum(0)
        both = torch.stack([predictions.flatten(), tokens.flatten()])
        self._counts.scatter_add_(1, both, torch.ones_like(both))
        means = latents.mean(1).float()  # B D
        with torch.autocast(means.device.type, enabled=False):  # whose rounding would add directions
            self._gram += means.T @ means

    def accuracy_by_place(self, bins: int) -> list[float]:
        """Token accuracy in percent of consecutive places of the permuted order, the first target's first."""
        return [100 * float(part.double().mean()) / self.images for part in self._hits.tensor_split(bins)]

    def effective_tokens(self) -> tuple[float, float]:
        """Of predictions and of targets: the exponential of the entropy in nats, 1 to V."""
        shares = self._counts / self._counts.sum(1, keepdim=True)
        predicted, targets = torch.special.entr(shares).sum(1).exp().tolist()
        return predicted, targets

    @property
    def gram(self) -> Float[Tensor, "dim dim"]:
        """`X^T X` of the images' mean latents: what their effective rank is taken of."""
        return self._gram
