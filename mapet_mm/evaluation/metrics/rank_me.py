"""Measures of features without labels: RankMe and other ranks, spectrum, spread, agreement of views."""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

FITTED = slice(11, 100)  # ranks 12 to 100, as in the authors' code of alpha-ReQ
RIDGE = 1e-4  # LiDAR's delta


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


def alpha_req(features: Float[Tensor, "row dim"]) -> float:
    """alpha-ReQ (Agrawal et al., 2022): the exponent of the power law of the covariance's eigenvalues.

    A line is fitted to their logarithms over that of their rank, each weighted by 1 / rank, from rank 12 to
    100; of fewer than 20 dimensions from rank 1. NaN if fewer than two eigenvalues are left, or one is not
    finite.
    """
    if len(features) < 2 or not features.isfinite().all():
        return float("nan")
    values = torch.linalg.eigvalsh(features.double().T.cov()).flip(0)
    ranks = torch.arange(1, 1 + len(values), dtype=torch.float64, device=values.device)
    kept = values > 1e-12 * values[0]
    part = FITTED if int(kept.sum()) >= 20 else slice(100)
    values = values[kept][part]
    ranks = ranks[kept][part]
    if len(values) < 2:
        return float("nan")
    # The weighted least squares line of log(value) over log(rank).
    weights = 1 / ranks / (1 / ranks).sum()
    x = ranks.log() - (weights * ranks.log()).sum()
    y = values.log() - (weights * values.log()).sum()
    return -float((weights * x * y).sum() / (weights * x * x).sum())


def uniformity(features: Float[Tensor, "row dim"]) -> float:
    """Uniformity (Wang and Isola, 2020): log of the mean of exp(-2 |x - y|^2) over pairs of directions.

    Lower is more evenly spread; 0 if all are the same.
    """
    return float(torch.pdist(F.normalize(features.double(), dim=1)).square().mul(-2).exp().mean().log())


def alignment(first: Float[Tensor, "row dim"], second: Float[Tensor, "row dim"]) -> float:
    """Alignment (Wang and Isola, 2020): mean of |x - y|^2 over the directions of two views of an image."""
    difference = F.normalize(first.double(), dim=1) - F.normalize(second.double(), dim=1)
    return float(difference.square().sum(1).mean())


def lidar(views: Float[Tensor, "row view dim"]) -> float:
    """LiDAR (Thilak et al., 2024): effective rank of the covariance between images, whitened by that within.

    It takes the eigenvalues of `S_w^-1/2 S_b S_w^-1/2`, with delta = 1e-4 on the diagonal of `S_w`. NaN if a
    feature is not finite.
    """
    views = views.double()
    if not views.isfinite().all():
        return float("nan")
    means = views.mean(1)
    inner = (views - means[:, None]).flatten(0, 1)
    outer = means - means.mean(0)
    within = inner.T @ inner / len(inner) + RIDGE * torch.eye(views.shape[2], dtype=views.dtype)
    root = torch.linalg.cholesky(within)  # whose whitening has the same eigenvalues
    whitened = torch.linalg.solve_triangular(root, outer.T, upper=False)
    return entropy_rank(torch.linalg.eigvalsh(whitened @ whitened.T / len(outer)))
