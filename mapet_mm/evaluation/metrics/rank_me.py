"""RankMe: the effective rank of features, a measure of them without labels."""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor


def rank_me(blocks: Iterable[Float[Tensor, "row dim"]]) -> float:
    """The effective rank of features (Garrido et al., 2023), from 1 to D; NaN if one is not finite.

    Singular values come from `X^T X`, so memory does not grow with the number of rows.

    Args:
        blocks: features, some rows at a time.
    """
    return effective_rank(sum(block.double().T @ block.double() for block in blocks))


def effective_rank(gram: Float[Tensor, "dim dim"]) -> float:
    """RankMe by `X^T X`: the exponential of the entropy of the singular values' shares; NaN if not finite."""
    if not gram.isfinite().all():
        return float("nan")
    return entropy_rank(torch.linalg.eigvalsh(gram.double().cpu()).clamp(min=0).sqrt())


def entropy_rank(values: Float[Tensor, " dim"]) -> float:
    """The exponential of the entropy of some values' shares: the rank of as many equal ones."""
    values = values.clamp(min=0)
    return float(torch.special.entr(values / values.sum()).sum().exp())
