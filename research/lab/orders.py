"""Orders of the patches that follow from their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mmpretrain.structures import DataSample
from torch import Tensor

from mapet_mm.models import MaPeT
from mapet_mm.models.target_generators.token_ids import token_ids
from mapet_mm.registry import MODELS
from mapet_mm.structures import TokenStore

DIRECTIONS = {"rare first": 1.0, "rare last": -1.0}


@MODELS.register_module()
class OrderedMaPeT(MaPeT):
    """MaPeT that draws the order of an image's patches by how frequent their tokens are.

    Patches are drawn one after the other, each with a probability that goes with the inverse of its token's
    frequency, or with the frequency ("rare last").

    Args:
        order: "rare first" or "rare last".
        store: token store by which tokens are counted.
        **kwargs: those of `MaPeT`.
    """

    def __init__(self, order: str, store: str, **kwargs) -> None:
        super().__init__(**kwargs)
        self.direction = DIRECTIONS[order]
        counts = count_tokens(store, self.head.vocab_size)
        self.register_buffer("log_counts", counts.clamp(min=1).log(), persistent=False)

    def ranks(self, tokens: Tensor) -> Tensor:
        """A drawn number for each patch, as `tokens` `(B, N)`; the lowest comes first."""
        # Largest of logarithm and Gumbel noise first: a draw without replacement.
        noise = -torch.empty(tokens.shape, device=tokens.device).exponential_().log()
        return self.direction * self.log_counts[tokens] - noise

    def loss(
        self, inputs: list[Tensor], data_samples: Sequence[DataSample] | None = None
    ) -> dict[str, Tensor]:
        """As MaPeT's, in an order that is drawn here."""
        tokens = token_ids(self.target_generator(inputs[1]))
        permutation = self.backbone.permutations(ranks=self.ranks(tokens))
        latents, permutation = self.latents(inputs[0], permutation)
        return self.head.loss(latents, self.target_tokens(inputs[1], permutation))


def count_tokens(store: str, vocab_size: int) -> Tensor:
    """How often each token is in a store, `(V,)`."""
    counts = torch.zeros(vocab_size)
    for _, grids in TokenStore.open(store).chunks():
        counts += torch.bincount(torch.from_numpy(grids.astype("int64")).flatten(), minlength=vocab_size)
    return counts
