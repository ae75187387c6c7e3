"""The jitter of a batch has torchvision's values, and each image's draws are its seed's."""

import itertools

import pytest
import torch
from torchvision.transforms import functional

from mapet_mm.models.data_preprocessors.color_jitter import BatchColorJitter
from mapet_mm.models.utils.permutation import seeded_permutations

OPERATORS = (functional.adjust_brightness, functional.adjust_contrast, functional.adjust_saturation)


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return 255 * torch.rand(64, 3, 9, 7, generator=torch.Generator().manual_seed(0))


def test_values_are_those_of_torchvisions_operators_in_the_drawn_order(images):
    jitter = BatchColorJitter(0.4, 0.4, 0.4)
    seeds = torch.arange(len(images))
    factors, orders = jitter.draw(seeds)
    jittered = jitter(images, seeds)
    for image, factor, order, result in zip(images, factors, orders, jittered, strict=True):
        expected = image / 255
        for operation in order.tolist():
            expected = OPERATORS[operation](expected, factor[operation].item())
        torch.testing.assert_close(result / 255, expected, rtol=0, atol=1e-6)


def test_an_image_is_the_same_in_every_batch(images):
    jitter = BatchColorJitter(0.4, 0.4, 0.4)
    seeds = torch.arange(len(images)) * 1_000_003
    together = jitter(images, seeds)
    alone = torch.cat([jitter(images[[i]], seeds[[i]]) for i in range(len(images))])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-4)
    assert not torch.equal(jitter(images, seeds + 1), together)


def test_factors_are_uniform_and_all_orders_equally_likely():
    factors, orders = BatchColorJitter(0.4, 0.2, 0.0).draw(torch.arange(60_000))
    for column, width in enumerate((0.4, 0.2)):
        levels = (factors[:, column] - 1) / width
        counts = torch.histc(levels.float(), bins=10, min=-1, max=1)
        assert counts.sum() == 60_000
        assert ((counts - 6_000).abs() < 5 * 6_000**0.5).all()
    assert (factors[:, 2] == 1).all()
    numbers = dict.fromkeys(itertools.permutations(range(3)), 0)
    for order in map(tuple, orders.tolist()):
        numbers[order] += 1
    assert all(abs(number - 10_000) < 500 for number in numbers.values())


def test_factors_order_and_permutation_of_an_image_do_not_depend_on_each_other():
    """Although all come from its seed: numbers that two of them share would correlate by 0.5 and more."""
    seeds = torch.arange(4_000) * 1_000_003
    factors, orders = BatchColorJitter(0.4, 0.4, 0.4).draw(seeds)
    places = orders.argsort(1)
    patch_ranks = seeded_permutations(seeds, 197).argsort(1)[:, 1:]
    drawn = torch.cat([factors, places, patch_ranks], dim=1).double()
    correlations = torch.corrcoef(drawn.T).abs()
    for some, others in ((slice(3), slice(3, None)), (slice(3, 6), slice(6, None))):
        # Six standard deviations of the correlation of 4,000 pairs.
        assert correlations[some, others].max() < 6 / 4_000**0.5


@pytest.mark.parametrize("options", [dict(brightness=-0.1), dict(contrast=1.5), dict(saturation=2.0)])
def test_a_value_that_is_not_a_share_is_refused(options):
    with pytest.raises(ValueError, match="color_jitter"):
        BatchColorJitter(**options)
