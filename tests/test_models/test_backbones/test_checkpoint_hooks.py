"""Weights of other networks in our ViTs: names, LayerScale, position embeddings, refusals."""

import pytest
import torch
from mmengine.runner.checkpoint import get_state_dict, load_checkpoint, save_checkpoint
from mmpretrain.models.backbones import VisionTransformer
from mmpretrain.models.selfsup import BEiTPretrainViT, CAEPretrainViT
from small_vit import ARCH, GEOMETRY, pretrain_vit, randomise
from torch import nn
from torch.nn import functional as F

from mapet_mm.models import MaPeTPretrainViT, MaPeTViT, TokenViT
from mapet_mm.models.backbones.checkpoint_hooks import source_grid

IMAGES = torch.randn(2, 3, 20, 20)
PLAIN = dict(use_abs_pos_emb=True, use_rel_pos_bias=False, use_shared_rel_pos_bias=False)


def build(grid, with_cls_token=True, **options) -> MaPeTViT:
    """A ViT of this grid of patches with random positions."""
    size = tuple(16 * side for side in grid)
    options = dict(out_type="raw", with_cls_token=with_cls_token) | options
    return randomise(MaPeTViT(dict(ARCH, num_layers=1), size, 16, **options))


@pytest.mark.parametrize("build_vit", [MaPeTViT, MaPeTPretrainViT])
@pytest.mark.parametrize("prefix", ["", "backbone."])
def test_weights_without_layer_scale_keep_their_features(build_vit, prefix, tmp_path, capture_log):
    """MAE's and DeiT's, by `init_cfg`."""
    theirs = randomise(VisionTransformer(out_type="raw", **GEOMETRY))
    weights = {prefix + name: value for name, value in theirs.state_dict().items()}
    save_checkpoint({"state_dict": weights}, str(tmp_path / "weights.pth"))
    init_cfg = dict(type="Pretrained", checkpoint=str(tmp_path / "weights.pth"), prefix=prefix or None)
    options = dict(cutting_point=8) if build_vit is MaPeTPretrainViT else dict(out_type="raw")
    vit = build_vit(init_cfg=init_cfg, **GEOMETRY, **options).eval()
    vit.init_weights()
    features = vit.encode(IMAGES) if build_vit is MaPeTPretrainViT else vit(IMAGES)
    torch.testing.assert_close(features[0], theirs(IMAGES)[0])
    assert capture_log().count("Filled 6 LayerScales") == 1


def test_a_whole_models_weights_without_layer_scale_keep_their_features(tmp_path):
    theirs = randomise(VisionTransformer(out_type="raw", **GEOMETRY))
    weights = {f"backbone.{name}": value for name, value in theirs.state_dict().items()}
    save_checkpoint({"state_dict": weights}, str(tmp_path / "weights.pth"))
    model = nn.ModuleDict({"backbone": MaPeTViT(out_type="raw", **GEOMETRY)}).eval()
    model.load_state_dict({"head.weight": torch.zeros(2)}, strict=False)
    assert model.backbone.layers[2].ffn.gamma2.weight.eq(0.1).all()
    load_checkpoint(model, str(tmp_path / "weights.pth"))
    torch.testing.assert_close(model.backbone(IMAGES)[0], theirs(IMAGES)[0])


@pytest.mark.parametrize("prefix", ["", "backbone."])
@pytest.mark.parametrize("layer_cfgs", [{}, [{}, dict(layer_scale_init_value=0.1), {}]], ids=["all", "two"])
def test_a_backbone_without_layer_scale_gives_the_features_of_weights_with_it(
    prefix, layer_cfgs, capture_log
):
    """Each is multiplied into the linear layer before it; layers of the backbone that have one keep it."""
    source = pretrain_vit()
    vit = MaPeTViT(layer_scale_init_value=0.0, layer_cfgs=layer_cfgs, out_type="raw", **GEOMETRY).eval()
    model = nn.ModuleDict({"backbone": vit}) if prefix else vit
    weights = {prefix + name: value for name, value in source.state_dict().items()}
    model.load_state_dict(weights, strict=True)
    torch.testing.assert_close(vit(IMAGES)[0], source.encode(IMAGES)[0])
    assert f"Folded {4 if layer_cfgs else 6} LayerScales" in capture_log()
    assert f"{prefix}layers.0.attn.gamma1.weight" in weights  # the checkpoint itself stays as it is


@pytest.mark.parametrize(
    "rename", [lambda name: f"encoder.vit.{name}", lambda name: name.replace("lay", "bl")]
)
@pytest.mark.parametrize("build_vit", [MaPeTViT, MaPeTPretrainViT])
def test_a_checkpoint_with_no_layer_of_the_backbone_is_refused(build_vit, rename, tmp_path):
    """MMEngine would log each name and train on from random weights."""
    options = dict(GEOMETRY, cutting_point=8) if build_vit is MaPeTPretrainViT else GEOMETRY
    checkpoint = {rename(name): value for name, value in build_vit(**options).state_dict().items()}
    save_checkpoint({"state_dict": checkpoint}, str(tmp_path / "weights.pth"))
    vit = build_vit(init_cfg=dict(type="Pretrained", checkpoint=str(tmp_path / "weights.pth")), **options)
    with pytest.raises(ValueError, match="none of the backbone's layers"):
        vit.init_weights()


def test_some_weights_by_themselves_are_taken():
    vit = MaPeTViT(**GEOMETRY)
    ones = torch.ones_like(vit.cls_token)
    vit.load_state_dict({"cls_token": ones, "mask_token": ones}, strict=False)
    assert torch.equal(vit.cls_token, ones)


@pytest.mark.parametrize("bias", [True, "qv_bias"])
@pytest.mark.parametrize("scale", [0.0, 0.1])
@pytest.mark.parametrize("family", [BEiTPretrainViT, CAEPretrainViT])
def test_a_plain_vit_computes_what_beit_and_cae_computed(family, scale, bias, capture_log):
    options = dict(layer_cfgs=dict(bias=bias)) if family is BEiTPretrainViT else dict(bias=bias)
    beit = randomise(family(ARCH, 20, 4, layer_scale_init_value=scale, **{**PLAIN, **options}))
    vit = MaPeTViT(ARCH, 20, 4, out_type="raw").eval()
    assert vit.load_state_dict(beit.state_dict(), strict=False) == ([], [])
    with torch.no_grad():
        torch.testing.assert_close(vit(IMAGES)[0], beit(IMAGES, mask=None)[0], rtol=1e-5, atol=1e-5)
    assert ("Renamed the parameters of 3 BEiT layers" in capture_log()) == (bool(scale) or bias == "qv_bias")


@pytest.mark.parametrize("positions", ["use_rel_pos_bias", "use_shared_rel_pos_bias"])
def test_relative_positions_are_refused(positions):
    """A plain ViT cannot express them, so the features would be others without a word."""
    beit = BEiTPretrainViT(ARCH, 20, 4, **{**PLAIN, positions: True})
    with pytest.raises(ValueError, match="relative position biases"):
        MaPeTViT(ARCH, 20, 4).load_state_dict(beit.state_dict(), strict=False)


def assert_resized(target, source):
    """Positions of the patches are PyTorch's interpolation of the source's true grid."""
    maps = source.pos_embed[:, source.num_extra_tokens :].unflatten(1, source.patch_resolution)
    maps = F.interpolate(
        maps.permute(0, 3, 1, 2), size=target.patch_resolution, mode="bicubic", align_corners=False
    )
    ours = target.pos_embed.detach()
    torch.testing.assert_close(ours[0, target.num_extra_tokens :], maps[0].flatten(1).T)
    if target.num_extra_tokens and source.num_extra_tokens:
        assert torch.equal(ours[:, 0], source.pos_embed[:, 0])


@pytest.mark.parametrize("target_has_class", [True, False])
@pytest.mark.parametrize("source_has_class", [True, False])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((4, 4), (4, 4)),
        ((4, 4), (8, 6)),
        ((4, 4), (6, 6)),
        ((2, 4), (2, 4)),
        ((2, 4), (4, 8)),
        ((8, 3), (4, 4)),
    ],
)
def test_positions_go_to_the_backbones_grid(source, target, source_has_class, target_has_class):
    told = source if source[0] != source[1] and source != target else None
    source, target = build(source, source_has_class), build(target, target_has_class, pretrained_grid=told)
    own_class = target.pos_embed[:, 0].clone()
    target.load_state_dict(source.state_dict(), strict=False)
    assert_resized(target, source)
    if target_has_class and not source_has_class:
        assert torch.equal(target.pos_embed[:, 0], own_class)


SOURCES = [  # patches, the backbone's own grid, recorded in the checkpoint, told by the user, found
    (8, (4, 2), (2, 4), None, (2, 4)),
    (8, (4, 2), (4, 2), (2, 4), (4, 2)),  # a resumed run has the option that its first weights needed
    (8, (4, 2), None, (2, 4), (2, 4)),
    (8, (4, 4), None, (2, 4), (2, 4)),
    (16, (4, 4), None, None, (4, 4)),
    (16, (8, 8), None, None, (4, 4)),
    (16, (2, 8), (2, 8), None, (2, 8)),
    (8, (4, 2), None, None, None),
    (8, (4, 2), None, (3, 3), None),
    (8, (4, 4), None, (3, 3), None),
    (16, (2, 8), None, None, None),  # its own, or a square
]


@pytest.mark.parametrize(("num_patches", "own", "recorded", "told", "found"), SOURCES)
def test_a_grid_is_known_or_refused(num_patches, own, recorded, told, found):
    if found:
        assert source_grid(num_patches, own, recorded, told) == found
    else:
        with pytest.raises(ValueError, match="`pretrained_grid`"):
            source_grid(num_patches, own, recorded, told)


@pytest.mark.parametrize("known", [True, False])
def test_an_oblong_grid_of_as_many_patches_is_resized_or_refused(known, tmp_path):
    """32 x 64 pixels into 64 x 32; files of MMEngine say which, files of weights alone do not."""
    source, target = build((2, 4)), build((4, 2))
    weights = get_state_dict(source)
    if not known:
        weights = dict(weights)
    save_checkpoint({"state_dict": weights}, str(tmp_path / "weights.pth"))
    if known:
        load_checkpoint(target, str(tmp_path / "weights.pth"))
        assert_resized(target, source)
    else:
        with pytest.raises(ValueError, match="8 patches"):
            load_checkpoint(target, str(tmp_path / "weights.pth"))


def test_weights_without_positions_and_token_classifiers_load():
    vit, weights = build((2, 4)), dict(build((2, 4)).state_dict())
    before = vit.pos_embed.clone()
    del weights["pos_embed"]
    vit.load_state_dict(weights, strict=False)
    assert torch.equal(vit.pos_embed, before)
    source, target = (randomise(TokenViT(5, grid, ARCH, pretrained_grid=(2, 4))) for grid in ((2, 4), [6, 2]))
    target.load_state_dict(source.state_dict())
    assert_resized(target, source)
