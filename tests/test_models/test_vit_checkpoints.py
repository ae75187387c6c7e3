"""Checkpoints going into backbones: LayerScale, names, prefixes, position embeddings, what is refused."""

import re

import pytest
import torch
from mmengine.runner.checkpoint import load_checkpoint, save_checkpoint
from mmpretrain.models.backbones import DistilledVisionTransformer, VisionTransformer
from small_vit import ARCH, GEOMETRY, pretrain_vit
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F

from mapet_mm.models import MaPeTPretrainViT, MaPeTViT


def save_without_layer_scale(path, prefix="") -> VisionTransformer:
    """Weights as MMPretrain's DeiT and MAE have them."""
    theirs = VisionTransformer(out_type="raw", **GEOMETRY)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_checkpoint({"state_dict": {prefix + k: v for k, v in theirs.state_dict().items()}}, str(path))
    return theirs


FILLED = "Filled 6 LayerScales (`{}layers.0.attn.gamma1.weight`, ...) with one: the checkpoint has none"


@pytest.mark.parametrize("prefix", ["", "backbone."])
@pytest.mark.parametrize("build", [MaPeTViT, MaPeTPretrainViT])
def test_weights_without_layer_scale_keep_their_features(build, prefix, tmp_path, capture_log):
    """By `init_cfg`, for fine-tuning and to go on pre-training; weights with LayerScale keep theirs."""
    theirs = save_without_layer_scale(tmp_path / "weights.pth", prefix)
    init_cfg = dict(type="Pretrained", checkpoint=str(tmp_path / "weights.pth"), prefix=prefix or None)
    options = dict(cutting_point=8) if build is MaPeTPretrainViT else dict(out_type="raw")
    vit = build(init_cfg=init_cfg, **GEOMETRY, **options).eval()
    vit.init_weights()
    images = torch.randn(2, 3, 20, 20)
    features = vit.encode(images) if build is MaPeTPretrainViT else vit(images)
    torch.testing.assert_close(features[0], theirs(images)[0])
    assert capture_log().count("Filled") == 1
    assert FILLED.format("") in capture_log()

    own = pretrain_vit()
    vit.load_state_dict(own.state_dict(), strict=False)
    assert torch.equal(vit.layers[0].attn.gamma1.weight, own.layers[0].attn.gamma1.weight)
    assert capture_log().count("Filled") == 1


def test_a_whole_models_weights_without_layer_scale_keep_their_features(tmp_path, capture_log):
    """By `load_from`; what has no layers of the backbone fills nothing."""
    theirs = save_without_layer_scale(tmp_path / "weights.pth", "backbone.")
    model = torch.nn.ModuleDict({"backbone": MaPeTViT(out_type="raw", **GEOMETRY)}).eval()
    model.load_state_dict({"head.weight": torch.zeros(2)}, strict=False)
    assert model.backbone.layers[2].ffn.gamma2.weight.eq(0.1).all()
    load_checkpoint(model, str(tmp_path / "weights.pth"))
    images = torch.randn(2, 3, 20, 20)
    torch.testing.assert_close(model.backbone(images)[0], theirs(images)[0])
    assert FILLED.format("backbone.") in capture_log()


@pytest.mark.parametrize("prefix", ["", "backbone."])
@pytest.mark.parametrize("layer_cfgs", [{}, [{}, dict(layer_scale_init_value=0.1), {}]], ids=["all", "two"])
def test_weights_with_layer_scale_keep_their_features_in_a_backbone_without(prefix, layer_cfgs, capture_log):
    """Each is multiplied into the linear layer before it; layers of the backbone that have one keep it."""
    source = pretrain_vit()
    vit = MaPeTViT(layer_scale_init_value=0.0, layer_cfgs=layer_cfgs, out_type="raw", **GEOMETRY).eval()
    model = torch.nn.ModuleDict({"backbone": vit}) if prefix else vit
    weights = {prefix + name: value for name, value in source.state_dict().items()}
    model.load_state_dict(weights, strict=True)
    images = torch.randn(2, 3, 20, 20)
    torch.testing.assert_close(vit(images)[0], source.encode(images)[0])
    number = 4 if layer_cfgs else 6
    assert f"Folded {number} LayerScales (`{prefix}layers.0.attn.gamma1.weight`, ...)" in capture_log()
    assert f"{prefix}layers.0.attn.gamma1.weight" in weights  # the checkpoint itself stays as it is


def test_other_layers_than_the_backbones_are_not_folded(capture_log):
    vit = MaPeTViT({**ARCH, "num_layers": 2}, 20, 4)
    vit.load_state_dict(pretrain_vit().state_dict(), strict=False)
    assert "Folded" not in capture_log()


@pytest.mark.parametrize("build", [MaPeTViT, MaPeTPretrainViT])
@pytest.mark.parametrize(
    ("renamed", "message"),
    [
        (
            lambda name: f"backbone.{name}",
            "its weights behind `backbone.`: add prefix='backbone.' to the backbone's `init_cfg`",
        ),
        (
            lambda name: f"encoder.vit.{name}",
            "its weights behind `encoder.vit.`: add prefix='encoder.vit.'",
        ),
        (
            lambda name: name.replace("layers.", "blocks."),
            "none of the backbone's layers, but `blocks.0.ln1.weight`, ...: ",
        ),
    ],
    ids=["whole model", "model inside a model", "other names"],
)
def test_a_checkpoint_with_no_layer_of_the_backbone_is_refused(build, renamed, message, tmp_path):
    """MMEngine would log each name and train on from random weights."""
    source = pretrain_vit() if build is MaPeTPretrainViT else MaPeTViT(**GEOMETRY)
    options = dict(GEOMETRY, cutting_point=8) if build is MaPeTPretrainViT else GEOMETRY
    checkpoint = {renamed(name): value for name, value in source.state_dict().items()}
    save_checkpoint({"state_dict": checkpoint}, str(tmp_path / "weights.pth"))
    vit = build(init_cfg=dict(type="Pretrained", checkpoint=str(tmp_path / "weights.pth")), **options)
    with pytest.raises(ValueError, match=re.escape(message)):
        vit.init_weights()


@pytest.mark.parametrize("build", [MaPeTViT, MaPeTPretrainViT])
@pytest.mark.parametrize("prefix", ["backbone", "backbone."])
def test_a_prefix_that_a_checkpoint_does_not_have_is_named(build, prefix, tmp_path):
    path = tmp_path / "vit.pth"
    save_checkpoint(
        {"state_dict": {"conv_proj.weight": torch.ones(1), "backbones.x": torch.ones(1)}}, str(path)
    )
    options = dict(GEOMETRY, cutting_point=8) if build is MaPeTPretrainViT else GEOMETRY
    vit = build(init_cfg=dict(type="Pretrained", checkpoint=str(path), prefix=prefix), **options)
    told = (
        f"{path} has no weights behind `backbone.`, but `conv_proj.weight`, ...: correct the prefix in the "
    )
    with pytest.raises(ValueError, match=re.escape(told)):
        vit.init_weights()


def test_some_weights_by_themselves_are_taken():
    """Those of the backbone, without others; and a model's, which may have none for its backbone."""
    vit = MaPeTViT(**GEOMETRY)
    ones = torch.ones_like(vit.cls_token)
    vit.load_state_dict({"cls_token": ones, "mask_token": ones}, strict=False)
    assert torch.equal(vit.cls_token, ones)
    vit.load_state_dict({}, strict=False)
    torch.nn.ModuleDict({"backbone": vit}).load_state_dict({"head.weight": ones}, strict=False)


def test_a_backbone_whose_layers_are_wrapped_takes_a_checkpoint():
    source, vit = pretrain_vit(), MaPeTViT(**GEOMETRY)
    for i, layer in enumerate(vit.layers):
        vit.layers[i] = checkpoint_wrapper(layer)
    vit.load_state_dict(source.state_dict(), strict=True)
    for own, value in zip(vit.layers.state_dict().values(), source.layers.state_dict().values(), strict=True):
        assert torch.equal(own, value)


def test_a_distillation_token_is_refused_by_name():
    theirs = DistilledVisionTransformer(**GEOMETRY)
    with pytest.raises(ValueError, match=r"distillation token .`dist_token`.*DistilledVisionTransformer"):
        MaPeTViT(**GEOMETRY).load_state_dict(theirs.state_dict(), strict=False)


def test_a_backbone_derived_with_a_distillation_token_takes_its_own():
    class Distilled(MaPeTViT):
        def __init__(self):
            super().__init__(**GEOMETRY)
            self.dist_token = torch.nn.Parameter(torch.zeros(1, 1, self.embed_dims))

    keys = Distilled().load_state_dict(Distilled().state_dict())
    assert keys == ([], [])


def test_an_init_cfg_counts_over_the_authors_weights(tmp_path):
    """As MMPretrain asks of its class; what is saved then goes to a larger image, strictly."""
    kaiming = dict(type="Kaiming", layer="Conv2d", mode="fan_in", nonlinearity="linear", bias=3)
    vit = MaPeTViT(init_cfg=[kaiming], **GEOMETRY)
    vit.init_weights()
    assert vit.patch_embed.projection.bias.eq(3).all()
    assert vit.layers[0].attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.1)
    save_checkpoint(vit.state_dict(), str(tmp_path / "weights.pth"))
    larger = MaPeTViT(**{**GEOMETRY, "img_size": 32})
    load_checkpoint(larger, str(tmp_path / "weights.pth"), strict=True)
    grid = vit.pos_embed[0, 1:].T.view(1, 24, 5, 5)
    resized = F.interpolate(grid, size=(8, 8), mode="bicubic", align_corners=False)
    torch.testing.assert_close(larger.pos_embed[0, 1:], resized.flatten(2)[0].T)


def test_pretraining_checkpoint_goes_downstream_by_init_cfg(tmp_path, capture_log):
    """Position embeddings are resized, mask token and head dropped, and what was not found is reported."""
    source = pretrain_vit()
    checkpoint = {f"backbone.{k}": v for k, v in source.state_dict().items()}
    checkpoint["head.projection.weight"] = torch.zeros(11, 24)
    save_checkpoint({"state_dict": checkpoint}, str(tmp_path / "pretrained.pth"))

    init_cfg = dict(type="Pretrained", checkpoint=str(tmp_path / "pretrained.pth"), prefix="backbone.")
    vit = MaPeTViT(
        arch=ARCH, img_size=40, patch_size=4, out_type="avg_featmap", final_norm=False, init_cfg=init_cfg
    )
    vit.init_weights()
    loaded, original = vit.state_dict(), source.state_dict()
    same = [name for name in loaded if name in original and name != "pos_embed"]
    assert len(same) == len(original) - 4  # without mask token, final norm, position embedding
    assert all(torch.equal(loaded[name], original[name]) for name in same)

    assert torch.equal(loaded["pos_embed"][:, 0], original["pos_embed"][:, 0])
    grid = original["pos_embed"][0, 1:].T.view(1, 24, 5, 5)
    resized = F.interpolate(grid, size=(10, 10), mode="bicubic", align_corners=False)
    torch.testing.assert_close(loaded["pos_embed"][0, 1:], resized.flatten(2)[0].T)

    log = capture_log()
    assert "Dropped `mask_token`" in log
    assert "missing keys in source state_dict: ln2.weight, ln2.bias" in log
    assert "unexpected key in source state_dict: ln1.weight, ln1.bias" in log
