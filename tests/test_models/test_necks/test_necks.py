"""Necks, by value."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mapet_mm.models import BatchNormNeck, SimpleFeaturePyramid


def test_batch_norm_neck_scales_each_channel_of_the_last_feature_map_and_drops_whole_channels():
    torch.manual_seed(0)
    maps = torch.randn(8, 40, 3, 5) * torch.arange(1.0, 41)[:, None, None] + 7
    (out,) = BatchNormNeck(40, dropout=0.0)((torch.zeros_like(maps), maps))
    torch.testing.assert_close(out.mean((0, 2, 3)), torch.zeros(40), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.std((0, 2, 3), correction=0), torch.ones(40), atol=1e-4, rtol=0)
    neck = BatchNormNeck(40, dropout=0.5)
    dropped = (neck.dropout(maps) == 0).flatten(2)
    assert torch.equal(dropped.all(2), dropped.any(2))
    assert 0.3 < dropped.float().mean() < 0.7
    torch.testing.assert_close(neck.eval()((maps,))[0], maps / (1 + 1e-5) ** 0.5)  # as it was drawn


def test_strides_are_those_of_the_scale_factors():
    neck = SimpleFeaturePyramid(32, 16, num_outs=5)
    features = torch.randn(2, 32, 4, 6, requires_grad=True)
    maps = neck((torch.zeros(2, 32, 4, 6), features))
    assert [tuple(one.shape) for one in maps] == [
        (2, 16, *size) for size in [(16, 24), (8, 12), (4, 6), (2, 3), (1, 2)]
    ]
    assert torch.equal(maps[4], maps[3][:, :, ::2, ::2])
    for one in maps:
        (gradient,) = torch.autograd.grad(one.square().sum(), features, retain_graph=True)
        assert gradient.norm() > 0


@pytest.mark.parametrize("factor", [3, 0.3, 0, -2])
def test_a_scale_that_is_not_a_power_of_two_is_refused(factor):
    with pytest.raises(ValueError, match="powers of two"):
        SimpleFeaturePyramid(32, scale_factors=(4, factor))


def test_the_numbers_are_those_of_the_paper_written_out():
    """The finest map and the coarsest, from the parameters in order; norms are over channels."""
    neck = SimpleFeaturePyramid(8, 4)
    for parameter in neck.parameters():
        nn.init.normal_(parameter)
    features = torch.randn(2, 8, 4, 6)

    def norm(x, weight, bias):
        x = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, unbiased=False) + 1e-6).sqrt()
        return x * weight[:, None, None] + bias[:, None, None]

    def end(x, narrow, *rest):
        x = norm(F.conv2d(x, narrow), *rest[:2])
        return norm(F.conv2d(x, rest[2], padding=1), *rest[3:])

    finest, _, _, coarsest = (list(level.parameters()) for level in neck.levels)
    up = norm(F.conv_transpose2d(features, *finest[:2], stride=2), *finest[2:4])
    up = F.conv_transpose2d(F.gelu(up), *finest[4:6], stride=2)
    maps = neck((features,))
    torch.testing.assert_close(maps[0], end(up, *finest[6:]), rtol=1e-4, atol=1e-4)
    down = features.unflatten(2, (2, 2)).unflatten(4, (3, 2)).amax((3, 5))
    torch.testing.assert_close(maps[3], end(down, *coarsest), rtol=1e-4, atol=1e-4)
