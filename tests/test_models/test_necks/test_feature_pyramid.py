"""A plain ViT's maps as MMSegmentation's heads take them: a true pyramid, or pairs with the class token."""

import pytest
import torch
from mmengine.registry import DefaultScope
from torch import nn
from torch.nn import functional as F

from mapet_mm.models import SimpleFeaturePyramid
from mapet_mm.registry import MODELS

ARCH = dict(embed_dims=32, num_layers=4, num_heads=2, feedforward_channels=64)
BACKBONE = dict(type="mapet_mm.MaPeTViT", arch=ARCH, img_size=64, patch_size=16, out_type="featmap")
HEAD = dict(channels=8, num_classes=3, norm_cfg=dict(type="BN"))
IMAGES = torch.randn(2, 3, 64, 96)


def segmentor(**parts) -> nn.Module:
    with DefaultScope.overwrite_default_scope("mmseg"):
        model = MODELS.build(dict(type="mmseg.EncoderDecoder", test_cfg=dict(mode="whole"), **parts))
    model.init_weights()
    return model.eval()


def test_strides_are_those_of_the_scale_factors():
    """A map of 4 x 6: four levels and one more, which takes every second value."""
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


def test_layers_are_those_of_vitdet():
    """Halved channels from doubling to doubling, a norm and GELU between; 1 x 1 and 3 x 3 without bias."""
    finest, finer, same, coarser = (
        [type(part).__name__ for part in level] for level in SimpleFeaturePyramid(32, 16).levels
    )
    out = ["Conv2d", "LayerNorm2d", "Conv2d", "LayerNorm2d"]
    assert finest == ["ConvTranspose2d", "LayerNorm2d", "GELU", "ConvTranspose2d", *out]
    assert finer == ["ConvTranspose2d", *out]
    assert same == out
    assert coarser == ["MaxPool2d", *out]
    assert SimpleFeaturePyramid(32, 16).levels[0][4].in_channels == 8


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


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_head_of_strides_learns_on_it(batch):
    neck = dict(type="mapet_mm.SimpleFeaturePyramid", in_channels=32, out_channels=16)
    head = dict(
        HEAD, type="FPNHead", in_channels=[16] * 4, in_index=[0, 1, 2, 3], feature_strides=[4, 8, 16, 32]
    )
    model = segmentor(backbone=BACKBONE, neck=neck, decode_head=head)
    logits = model(IMAGES[:1].repeat(batch, 1, 1, 1))
    assert logits.shape == (batch, 3, 16, 24)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.neck.parameters())


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_dpt_takes_pairs_of_map_and_class_token(batch):
    """Also two images: a batch of maps alone would be taken for a pair."""
    backbone = dict(BACKBONE, out_type="featmap_and_cls_token", out_indices=(0, 1, 2, 3), final_norm=False)
    head = dict(
        HEAD,
        type="DPTHead",
        in_channels=(32,) * 4,
        in_index=(0, 1, 2, 3),
        input_transform="multiple_select",
        embed_dims=32,
        post_process_channels=[8, 8, 16, 16],
    )
    model = segmentor(backbone=backbone, decode_head=head)
    images = IMAGES[:1].repeat(batch, 1, 1, 1)
    assert model(images).shape[:2] == (batch, 3)
    pairs = model.backbone(images)
    model.backbone.out_type = "raw"
    for (features, class_token), tokens in zip(pairs, model.backbone(images), strict=True):
        assert torch.equal(class_token, tokens[:, 0])
        assert torch.equal(features.flatten(2).mT, tokens[:, 1:])
        assert features.shape == (batch, 32, 4, 6)
