"""Measures without labels, of matrices whose values are known."""

import math

import pytest
import torch

from mapet_mm.evaluation.metrics.rank_me import alignment, alpha_req, lidar, uniformity


def with_spectrum(values: torch.Tensor, rows: int = 512) -> torch.Tensor:
    """Centred features whose covariance has these eigenvalues, in directions at random."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator).double())[0]
    scores = torch.randn(rows, len(values), generator=generator).double()
    scores = torch.linalg.qr(scores - scores.mean(0))[0] * math.sqrt(rows - 1)
    return scores * values.sqrt() @ directions + 3


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("dim", [8, 128])
def test_alpha_req_is_the_exponent_of_a_power_law(exponent, dim):
    features = with_spectrum(torch.arange(1, dim + 1).double() ** -exponent)
    assert alpha_req(features) == pytest.approx(exponent, abs=1e-6)


def test_alpha_req_fits_ranks_12_to_100_with_falling_weights():
    """Another law before and behind them changes nothing; a kink inside counts by 1 / rank."""
    ranks = torch.arange(1, 129).double()
    values = torch.where((ranks < 12) | (ranks > 100), ranks**-1 * 9, ranks**-1.5)
    values = values.sort(descending=True).values if not (values.diff() <= 0).all() else values
    inside = values[11:100].log(), ranks[11:100].log()
    x = torch.stack([inside[1], torch.ones(89).double()], 1)
    weights = 1 / ranks[11:100, None]
    expected = -torch.linalg.solve(x.T @ (weights * x), x.T @ (weights[:, 0] * inside[0]))[0].item()
    assert alpha_req(with_spectrum(values)) == pytest.approx(expected, abs=1e-6)
    assert math.isnan(alpha_req(torch.randn(9, 1) @ torch.ones(1, 4)))  # one direction
    assert math.isnan(alpha_req(torch.randn(1, 4)))  # one image
    missing = torch.full((9, 4), float("nan"))
    assert math.isnan(alpha_req(missing))
    assert math.isnan(lidar(missing[:, None]))


def test_uniformity_of_pairs_of_known_distance():
    """Four corners of a square on the circle: four pairs at 2, two at 4; and one point thrice."""
    corners = torch.tensor([[2.0, 0], [0, 1], [-3, 0], [0, -1]])
    expected = math.log((4 * math.exp(-4) + 2 * math.exp(-8)) / 6)
    assert uniformity(corners) == pytest.approx(expected)
    assert uniformity(torch.ones(3, 5)) == pytest.approx(0, abs=1e-9)


def test_alignment_is_the_mean_squared_distance_of_directions():
    first, second = torch.tensor([[1.0, 0], [0, 2]]), torch.tensor([[5.0, 0], [3, 0]])
    assert alignment(first, second) == pytest.approx((0 + 2) / 2)


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_lidar_is_the_number_of_directions_that_tell_images_apart(rank):
    """As many equal eigenvalues between images, over equal noise within them."""
    means = torch.zeros(2 * rank, 8)
    means[::2, :rank], means[1::2, :rank] = torch.eye(rank), -torch.eye(rank)
    noise = torch.cat([torch.eye(8), -torch.eye(8)])  # each image by turns
    views = means[:, None] + torch.stack([noise, -noise], 1).repeat(rank, 1, 1)[: 2 * rank]
    if rank == 8:
        assert lidar(views) == pytest.approx(rank, abs=1e-3)
    else:
        assert lidar(means[:, None].repeat(1, 2, 1)) == pytest.approx(rank, abs=1e-6)


def test_lidar_whitens_by_the_noise_within_images():
    """A direction in which an image's own views differ as much counts less."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(4000, 1, 2, generator=generator)
    noise = torch.randn(4000, 2, 2, generator=generator) * torch.tensor([1.0, 0.1])
    # Eigenvalues: variance between means over half the noise, which the mean of two views leaves in both.
    between = 1 + torch.tensor([1.0, 0.01]) / 2
    within = torch.tensor([1.0, 0.01]) / 2 + 1e-4
    shares = between / within / (between / within).sum()
    expected = math.exp(-(shares * shares.log()).sum())
    assert lidar(means + noise) == pytest.approx(expected, rel=0.02)
