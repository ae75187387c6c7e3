"""A head that is told strides its maps do not have is warned of."""

import pytest
import torch
from mmengine.registry import DefaultScope
from torch import nn

from mapet_mm.engine.hooks.stride_check_hook import StrideCheckHook, wrong_strides
from mapet_mm.registry import MODELS

ARCH = dict(embed_dims=32, num_layers=4, num_heads=2, feedforward_channels=64)
FOUR_MAPS = dict(
    type="mapet_mm.MaPeTViT",
    arch=ARCH,
    img_size=64,
    patch_size=16,
    out_type="featmap",
    out_indices=(0, 1, 2, 3),
)
FPN = dict(type="FPN", in_channels=[32] * 4, out_channels=16, num_outs=4)
PYRAMID = dict(type="mapet_mm.SimpleFeaturePyramid", in_channels=32, out_channels=16)
FEATURE2PYRAMID = dict(type="Feature2Pyramid", embed_dim=32, norm_cfg=dict(type="BN"))


def segmentor(neck: dict | None, strides=(4, 8, 16, 32), width: int = 16, patch_size: int = 16) -> nn.Module:
    backbone = dict(FOUR_MAPS, patch_size=patch_size)
    head = dict(type="FPNHead", in_channels=[width] * 4, in_index=[0, 1, 2, 3], feature_strides=list(strides))
    head |= dict(channels=8, num_classes=3, norm_cfg=dict(type="BN"))
    with DefaultScope.overwrite_default_scope("mmseg"):
        return MODELS.build(dict(type="mmseg.EncoderDecoder", backbone=backbone, neck=neck, decode_head=head))


@pytest.mark.parametrize(("neck", "width"), [(FPN, 16), (None, 32)], ids=["FPN", "no neck"])
def test_a_vits_maps_are_no_pyramid(neck, width):
    (line,) = wrong_strides(segmentor(neck, width=width))
    assert line.startswith("`decode_head` is told maps of strides 4, 8, 16, 32, but they have 16, 16, 16, 16")
    assert "`mapet_mm.SimpleFeaturePyramid`" in line


@pytest.mark.parametrize(
    ("neck", "strides", "width"),
    [
        (PYRAMID, (4, 8, 16, 32), 16),
        (FEATURE2PYRAMID, (4, 8, 16, 32), 32),
        (FPN, (16, 16, 16, 16), 16),
        (dict(PYRAMID, scale_factors=(2, 1, 0.5), num_outs=4), (8, 16, 32, 64), 16),
    ],
)
def test_where_strides_are_right_nothing_is_said(neck, strides, width):
    assert wrong_strides(segmentor(neck, strides, width)) == []


@pytest.mark.parametrize(
    ("patch_size", "strides"),
    [(14, (3.5, 7, 14, 28)), (8, (2, 4, 8, 16)), (24, (6, 12, 24, 48)), (32, (8, 16, 32, 64))],
)
def test_strides_of_other_patches_are_told_apart(patch_size, strides):
    """Also of patches that do not divide 256 pixels, whose last column would be padded."""
    assert wrong_strides(segmentor(PYRAMID, strides, patch_size=patch_size)) == []
    (line,) = wrong_strides(segmentor(PYRAMID, [2 * x for x in strides], patch_size=patch_size))
    assert line.split(": put")[0].endswith(f"but they have {', '.join(f'{x:g}' for x in strides)}")


def test_strides_that_are_nearly_right_are_warned_of():
    (line,) = wrong_strides(segmentor(PYRAMID, patch_size=14))
    assert line.startswith("`decode_head` is told maps of strides 4, 8, 16, 32, but they have 3.4, 6.7, 13.5")


class Detector(nn.Module):
    """With what MMDetection's heads and extractors are told."""

    def __init__(self, anchors, regions) -> None:
        super().__init__()
        self.neck = nn.Conv2d(3, 3, 16, 16)
        self.rpn_head, self.extractor, self.plain = nn.Identity(), nn.Identity(), nn.Identity()
        self.rpn_head.prior_generator = type("Generator", (), {"strides": anchors})()
        self.extractor.featmap_strides = regions

    def extract_feat(self, images):
        return tuple(self.neck(images) for _ in range(5))


def test_anchors_and_regions_are_looked_at_as_well():
    lines = wrong_strides(Detector([(4, 4), (8, 8)], [16, 16]))
    assert [line.split(" is told")[0] for line in lines] == ["`rpn_head`"]
    assert len(wrong_strides(Detector([(16, 16)] * 5, [4, 8, 16, 32]))) == 1
    assert wrong_strides(Detector([16] * 5, [16] * 4)) == []


def test_the_model_is_as_before(capture_log):
    model = segmentor(FPN)
    model.train()
    state = torch.random.get_rng_state()
    StrideCheckHook().before_train(type("Runner", (), {"model": model})())
    assert model.training
    assert model.decode_head.training
    assert torch.equal(torch.random.get_rng_state(), state)
    assert capture_log().count("`decode_head` is told maps") == 1
