"""Permutations that depend on an image's seed and on nothing else."""

from collections.abc import Sequence

import torch
from jaxtyping import Int64
from mmengine.structures import BaseDataElement
from torch import Tensor
from torch.nn import functional as F

# SplitMix64's, as the signed numbers that a tensor holds.
STEP, FIRST, SECOND = (
    value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def seeded_permutations(seeds: Int64[Tensor, " batch"], num_tokens: int) -> Int64[Tensor, "batch token"]:
    """A uniform random order of the patches for each seed; the class token (0) always comes first.

    Integer arithmetic alone: the same on every device, in whatever batch a seed comes.

    Args:
        seeds: `(B,)`.
        num_tokens: `N`, with the class token.

    Returns:
        `(B, N)` int64: `permutation[b, t]` is the token at place `t`.
    """
    places = torch.arange(1, num_tokens, device=seeds.device)
    keys = seeds[:, None] + places * STEP  # B N-1, modulo 2^64
    keys = (keys ^ _shift_right(keys, 30)) * FIRST
    keys = (keys ^ _shift_right(keys, 27)) * SECOND
    keys = keys ^ _shift_right(keys, 31)
    return F.pad(keys.argsort(dim=1, stable=True) + 1, (1, 0))


def seeds_of(data_samples: Sequence[BaseDataElement] | None) -> Int64[Tensor, " batch"] | None:
    """The seeds that a loader gave a batch's images, in the host's memory; None where it gave none."""
    seeds = [sample.get("draw_seed") for sample in data_samples or ()]
    return torch.tensor(seeds) if seeds and None not in seeds else None


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """As of numbers without a sign: zeros come in from the left."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
