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
from mapet_mm.tokenizers import Codebook


@MODELS.register_module()
class OrderedMaPeT(MaPeT):
    """MaPeT that draws the order of an image's patches by their tokens.

    Patches are drawn one after the other, each with a probability that goes with the inverse of its token's
    frequency ("rare first"), with the frequency ("rare last"), or with the `saliency` of its token ("salient
    first").

    Args:
        order: one of these.
        store: token store by which tokens are counted.
        codebook: file of the tokens' centroids.
        **kwargs: those of `MaPeT`.
    """

    def __init__(self, order: str, store: str, codebook: str, **kwargs) -> None:
        super().__init__(**kwargs)
        counts = count_tokens(store, self.head.vocab_size)
        log_counts = counts.clamp(min=1).log()
        if order == "salient first":
            keys = -saliency(Codebook.load(codebook).centroids, counts, log_counts)
        else:
            keys = {"rare first": log_counts, "rare last": -log_counts}[order]
        self.register_buffer("keys", keys, persistent=False)

    def ranks(self, tokens: Tensor) -> Tensor:
        """A drawn number for each patch, as `tokens` `(B, N)`; the lowest comes first."""
        # Largest of logarithm and Gumbel noise first: a draw without replacement.
        noise = -torch.empty(tokens.shape, device=tokens.device).exponential_().log()
        return self.keys[tokens] - noise

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


def saliency(centroids: Tensor, counts: Tensor, log_counts: Tensor) -> Tensor:
    """How far a token's centroid is from the mean over all patches, `(V,)`, as a logarithm of a weight.

    Standardised over the patches to the deviation of `log_counts`, so that the order is as sharp as that of
    frequencies.
    """
    shares = counts / counts.sum()
    distances = (centroids - shares @ centroids).norm(dim=1)
    deviations = []
    for values in (distances, log_counts):
        deviations.append((shares @ (values - shares @ values).square()).sqrt())
    return distances / deviations[0] * deviations[1]
