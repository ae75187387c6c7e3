"""Permutations of an image's patches, by its seed alone or by given ranks, and when to check foreign ones."""

import torch
from jaxtyping import Int, Int64, Shaped
from torch import Tensor, nn

from mapet_mm.utils.splitmix import splitmix_of_tensor


def seeded_permutations(
    seeds: Int64[Tensor, " batch"], num_tokens: int, num_extra_tokens: int = 1
) -> Int64[Tensor, "batch token"]:
    """A uniform random order of the patches for each seed, after the class token (0) and any registers.

    Integer arithmetic alone: the same on every device, in whatever batch a seed comes. `num_tokens` includes
    the extra ones, which keep their order. `permutation[b, t]` is the token of rank `t`.
    """
    patches = torch.arange(1, num_tokens - num_extra_tokens + 1, device=seeds.device)
    return ranked_permutations(splitmix_of_tensor(seeds[:, None], patches), num_extra_tokens)


def ranked_permutations(
    ranks: Shaped[Tensor, "batch patch"], num_extra_tokens: int = 1
) -> Int64[Tensor, "batch token"]:
    """The patches in ascending order of their ranks, any numbers, after the extra tokens.

    Patches of equal rank stay in raster order.
    """
    order = ranks.argsort(dim=1, stable=True) + num_extra_tokens
    extra = torch.arange(num_extra_tokens, device=ranks.device).expand(len(ranks), -1)
    return torch.cat([extra, order], dim=1)


def check_permutation(permutation: Int[Tensor, "batch token"], num_extra_tokens: int = 1) -> None:
    """Raise ValueError if a row is not a permutation of all tokens that starts with the extra tokens.

    A token that comes twice would be seen twice, and another never.
    """
    tokens = torch.arange(permutation.shape[1], device=permutation.device)
    has_all = (permutation.sort(1).values == tokens).all(1)
    has_extra_first = (permutation == tokens)[:, :num_extra_tokens].all(1)
    right = has_all & has_extra_first
    if right.all():
        return
    row = right.tolist().index(False)
    raise ValueError(
        f"permutation[{row}] does not have each of the tokens 0..{len(tokens) - 1} once, the first "
        f"{num_extra_tokens} (class token, registers) in front"
    )


def should_check_values(module: nn.Module, values: Tensor) -> bool:
    """True if a module should check these values: always on CPU, else only until it sets `values_checked`.

    Reading values waits for the device, and cannot be part of a compiled graph.
    """
    return not torch.compiler.is_compiling() and (values.device.type == "cpu" or not module.values_checked)
