"""Necks, by value."""

import torch

from mapet_mm.models import BatchNormNeck


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
