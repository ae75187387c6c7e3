"""RankMe counts the directions of features."""

import math

import pytest
import torch

from mapet_mm.evaluation.metrics.rank_me import effective_rank, rank_me


def test_rank_me_counts_directions():
    basis = torch.linalg.qr(torch.randn(16, 16))[0]
    features = torch.randn(4000, 3) @ basis[:3]
    assert rank_me(features.split(100)) == pytest.approx(3, abs=0.01)


def test_the_effective_rank_is_the_exponential_of_the_shares_entropy():
    assert effective_rank(torch.eye(5)) == pytest.approx(5)
    entropy = -sum(share * math.log(share) for share in (0.75, 0.25))
    assert effective_rank(torch.diag(torch.tensor([9.0, 1.0, 0.0]))) == pytest.approx(math.exp(entropy))
    assert math.isnan(effective_rank(torch.full((2, 2), torch.inf)))
