"""Converted weights give the same outputs in the authors', timm's and Hugging Face's networks."""

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import transformers
from mmengine.config import Config
from mmpretrain.registry import MODELS
from torch import nn

from mapet_mm.interop.convert import (
    hf_to_mm,
    mm_to_hf,
    mm_to_reference,
    mm_to_timm,
    reference_to_mm,
    timm_to_mm,
)
from mapet_mm.models import MaPeT, MaPeTPretrainViT, MaPeTViT
from mapet_mm.weight_files import read_weights, write_weights

ARCH = dict(embed_dims=24, num_layers=3, num_heads=3, feedforward_channels=96)
TOOL = Path(__file__).parents[1] / "tools" / "convert.py"


def randomised(model: nn.Module) -> nn.Module:
    """Every parameter drawn anew, biases, norms and LayerScale too, so that none can be mixed up."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.fixture
def pretrained() -> dict[str, torch.Tensor]:
    model = MaPeT(
        backbone=dict(
            type="mapet_mm.MaPeTPretrainViT", arch=ARCH, img_size=20, patch_size=4, cutting_point=8
        ),
        head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=24, vocab_size=32),
        target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=32),
    )
    return randomised(model).state_dict()


@pytest.fixture
def classifier() -> nn.Module:
    backbone = dict(
        type="mapet_mm.MaPeTViT",
        arch=ARCH,
        img_size=20,
        patch_size=4,
        out_type="avg_featmap",
        final_norm=False,
    )
    head = dict(type="LinearClsHead", num_classes=7, in_channels=24)
    return randomised(MODELS.build(dict(type="ImageClassifier", backbone=backbone, head=head)))


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 20, 20)


def trunk_of(weights: dict[str, torch.Tensor]) -> MaPeTViT:
    """The plain ViT with the backbone's weights; gives class token and patches after the final norm."""
    vit = MaPeTViT(ARCH, 20, 4, out_type="raw")
    own = {k.removeprefix("backbone."): v for k, v in weights.items() if k.startswith("backbone.")}
    own.pop("mask_token", None)
    vit.load_state_dict(own)
    return vit.eval()


def assert_same_weights(ours: dict, others: dict) -> None:
    assert set(ours) == set(others)
    for name, value in ours.items():
        assert torch.equal(value, others[name]), name


def timm_vit(**options) -> nn.Module:
    return timm.models.VisionTransformer(
        **dict(img_size=20, patch_size=4, embed_dim=24, depth=3, num_heads=3, init_values=0.1) | options
    ).eval()


@torch.no_grad()
def test_timm_gives_the_same_tokens(pretrained, images):
    vit = timm_vit(num_classes=0)
    vit.load_state_dict(mm_to_timm(pretrained), strict=True)
    torch.testing.assert_close(
        vit.forward_features(images), trunk_of(pretrained)(images)[0], rtol=1e-5, atol=1e-5
    )


@torch.no_grad()
def test_timm_gives_the_same_classes(classifier, images):
    vit = timm_vit(num_classes=7, global_pool="avg")
    vit.load_state_dict(mm_to_timm(classifier.state_dict()), strict=True)
    expected = classifier.head(classifier.extract_feat(images))
    torch.testing.assert_close(vit(images), expected, rtol=1e-5, atol=1e-5)
    assert_same_weights(timm_to_mm(vit.state_dict()), classifier.state_dict())


@torch.no_grad()
def test_hugging_face_gives_the_same_tokens(pretrained, images, tmp_path):
    """By a folder as on the Hub, whose names every version of transformers knows."""
    config = dinov2_config()
    config.save_pretrained(tmp_path)
    write_weights(tmp_path / "model.safetensors", mm_to_hf(pretrained))
    vit, report = transformers.Dinov2Model.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    expected = trunk_of(pretrained)(images)[0]
    torch.testing.assert_close(vit.eval()(images).last_hidden_state, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("left_out", ["nothing", "backbone.mask_token"])
def test_hugging_faces_names_convert_back(pretrained, left_out):
    """Of a pre-trained model, and of a plain ViT, which has no mask token."""
    pretrained.pop(left_out, None)
    backbone = {name: value for name, value in pretrained.items() if name.startswith("backbone.")}
    assert_same_weights(hf_to_mm(mm_to_hf(pretrained)), backbone)


def test_the_authors_names_convert_both_ways(data_dir):
    golden = np.load(data_dir / "mapet_reference_d48.npz")
    theirs = {k[2:]: torch.from_numpy(golden[k]) for k in golden.files if k.startswith("w/")}
    ours = reference_to_mm({f"module.{name}": value for name, value in theirs.items()})
    assert_same_weights(mm_to_reference(ours), theirs)
    image, patch, dim, depth, heads, cutting_point, _ = golden["meta"].tolist()
    arch = dict(embed_dims=dim, num_layers=depth, num_heads=heads, feedforward_channels=4 * dim)
    vit = MaPeTPretrainViT(arch, image, patch, cutting_point)
    assert {f"backbone.{name}" for name in vit.state_dict()} == {n for n in ours if n.startswith("backbone.")}


def test_the_authors_fine_tuned_names_convert_both_ways(classifier):
    ours = classifier.state_dict()
    theirs = mm_to_reference(ours)
    assert {"fc_norm.weight", "head.bias", "blocks.2.attn.kv.bias"} <= set(theirs)
    assert_same_weights(reference_to_mm(theirs), ours)


@pytest.fixture
def told(monkeypatch) -> list[str]:
    """The lines that a conversion says."""
    lines = []
    monkeypatch.setattr("mapet_mm.interop.convert.print_log", lambda line, *_: lines.append(line))
    return lines


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (dict(init_values=None), "Filled 3 x `backbone.layers.I.attn.gamma1.weight` with one"),
        (dict(qkv_bias=False), "Filled 3 x `backbone.layers.I.attn.qkv.bias` with zero"),
        (dict(no_embed_class=True), "Put a zero position before the 25 positions of the patches"),
        (
            dict(class_token=False, global_pool="avg", fc_norm=False),
            "There is no class token: MaPeTViT takes",
        ),
    ],
)
def test_what_a_vit_of_timm_does_without_changes_no_output(options, line, images, told):
    vit = randomised(timm_vit(**{"num_classes": 0, "init_values": 0.1, **options}))
    ours = MaPeTViT(ARCH, 20, 4, out_type="raw", with_cls_token="class_token" not in options)
    own = {name.removeprefix("backbone."): v for name, v in timm_to_mm(vit.state_dict()).items()}
    ours.load_state_dict(own, strict=True)
    torch.testing.assert_close(ours.eval()(images)[0], vit.forward_features(images), rtol=1e-5, atol=1e-5)
    assert told[0].startswith(line)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(reg_tokens=4), "`reg_token`: MaPeTViT has nothing of this name"),
        (dict(qk_norm=True), "`blocks.0.attn.q_norm.weight`: MaPeTViT has nothing"),
        (dict(pre_norm=True), "`norm_pre.weight`: MaPeTViT has nothing"),
        (dict(mlp_layer=timm.layers.SwiGLU), "`blocks.0.mlp.fc1_g.weight`: MaPeTViT has nothing"),
        (dict(mlp_layer=timm.layers.SwiGLUPacked), r"layers.0.0.weight` .* shape \(96, 24\), .* \(48, 24\)"),
        (dict(pos_embed="none"), r"`backbone.pos_embed` \(this package's name\) is missing"),
    ],
)
def test_what_a_vit_of_timm_has_more_is_refused_by_name(options, match):
    with pytest.raises(ValueError, match=match):
        timm_to_mm(timm_vit(num_classes=0, **options).state_dict())


def dinov2_config(**options) -> transformers.Dinov2Config:
    sizes = dict(hidden_size=24, num_hidden_layers=3, num_attention_heads=3, image_size=20, patch_size=4)
    return transformers.Dinov2Config(**sizes, mlp_ratio=4, **options)


@torch.no_grad()
def test_a_dinov2_of_hugging_face_gives_the_same_tokens_here(images, tmp_path, told):
    vit = randomised(transformers.Dinov2Model(dinov2_config(qkv_bias=False)))
    vit.save_pretrained(tmp_path)
    ours = hf_to_mm(read_weights(tmp_path))
    expected = vit(images).last_hidden_state
    torch.testing.assert_close(trunk_of(ours)(images)[0], expected, rtol=1e-5, atol=1e-5)
    assert told == [
        "Filled 3 x `backbone.layers.I.attn.qkv.bias` with zero: there is none, and outputs stay the same."
    ]


def test_what_a_dinov2_has_more_is_refused_by_name(tmp_path):
    transformers.Dinov2Model(dinov2_config(use_swiglu_ffn=True)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"mlp.weights_in.bias`: MaPeTViT has nothing of this name"):
        hf_to_mm(read_weights(tmp_path))
    with pytest.raises(ValueError, match=r"`embeddings.register_tokens`: MaPeTViT has nothing of this name"):
        hf_to_mm({"embeddings.register_tokens": torch.zeros(1, 4, 24)})


@torch.no_grad()
@pytest.mark.parametrize(
    "wrap", ["backbone.", "", "module.backbone.", "backbone._orig_mod.", "_orig_mod.module.backbone."]
)
def test_a_backbone_converts_under_every_wrapper(wrap, pretrained, images):
    backbone = {k.removeprefix("backbone."): v for k, v in pretrained.items() if k.startswith("backbone.")}
    assert_same_weights(
        mm_to_timm({f"{wrap}{name}": v for name, v in backbone.items()}), mm_to_timm(pretrained)
    )


@torch.no_grad()
def test_a_beit_of_mmpretrain_gives_the_same_tokens_in_timm(images):
    """With absolute positions it is a plain ViT under other names."""
    vit = MODELS.build(
        dict(
            type="mmpretrain.BEiTViT",
            arch=ARCH,
            img_size=20,
            patch_size=4,
            use_abs_pos_emb=True,
            use_rel_pos_bias=False,
            use_shared_rel_pos_bias=False,
            layer_scale_init_value=0.1,
            out_type="raw",
            final_norm=True,
        )
    )
    theirs = timm_vit(num_classes=0)
    randomised(vit)
    theirs.load_state_dict(mm_to_timm({f"backbone.{name}": v for name, v in vit.state_dict().items()}))
    torch.testing.assert_close(theirs.forward_features(images), vit(images)[0], rtol=1e-5, atol=1e-5)


def test_layer_scale_left_out_is_one_in_every_direction(pretrained, told):
    without = {name: value for name, value in pretrained.items() if "gamma" not in name}
    ones = {n: torch.ones_like(v) if "gamma" in n else v for n, v in pretrained.items()}
    for convert_to in (mm_to_reference, mm_to_timm, mm_to_hf):
        assert_same_weights(convert_to(without), convert_to(ones))
    theirs = {name: v for name, v in mm_to_reference(ones).items() if ".ls" not in name}
    assert_same_weights(reference_to_mm(theirs), ones)
    assert len(told) == 8


def test_what_is_missing_is_named(pretrained):
    cut = {name: value for name, value in pretrained.items() if not name.startswith("backbone.layers.1.")}
    with pytest.raises(ValueError, match=r"`backbone.layers.1.ffn.layers.1.weight` .* is missing"):
        mm_to_timm(cut)
    headless = {name: value for name, value in pretrained.items() if name != "backbone.cls_token"}
    for convert_to in (mm_to_reference, mm_to_hf):
        with pytest.raises(ValueError, match=r"no class token \(`backbone.cls_token`\)"):
            convert_to(headless)


def test_what_has_no_place_is_named(pretrained, classifier):
    with pytest.raises(ValueError, match=r"`blocks.0.attn.k_norm.weight`: MaPeTViT has nothing of this name"):
        timm_to_mm({"blocks.0.attn.k_norm.weight": torch.ones(1)})
    with pytest.raises(ValueError, match=r"`neck.weight`: timm's VisionTransformer has nothing of this name"):
        mm_to_timm(pretrained | {"neck.weight": torch.ones(1)})
    with pytest.raises(ValueError, match=r"the weights have no final norm \(`backbone.ln1`\)"):
        mm_to_hf(classifier.state_dict())


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (dict(layer_cfgs=dict(ffn_type="swiglu_fused")), r"layers\.0\.ffn\.w12\.weight"),
        (dict(layer_cfgs=dict(num_fcs=3)), r"layers\.0\.ffn\.layers\.2\.weight"),
        (dict(pre_norm=True), r"pre_norm\.weight"),
    ],
    ids=["swiglu", "three layers", "pre-norm"],
)
def test_what_our_own_vit_has_more_is_refused_by_name(options, name):
    weights = MaPeTViT(ARCH, 20, 4, **options).state_dict()
    for convert_to in (mm_to_reference, mm_to_timm, mm_to_hf):
        with pytest.raises(ValueError, match=rf"`backbone\.{name}`.* nothing of this name"):
            convert_to(weights)


def test_a_missing_half_of_an_attention_is_named():
    with pytest.raises(
        ValueError, match=r"`blocks.0.attn.kv.bias` is missing: it belongs to `blocks.0.attn.q.bias`"
    ):
        reference_to_mm({"blocks.0.attn.q.bias": torch.ones(3)})


def convert(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["convert.py", *map(str, arguments)])
    runpy.run_path(str(TOOL), run_name="__main__")


def test_the_tool_converts_files_there_and_back(classifier, tmp_path, monkeypatch, capsys):
    ours, theirs, back = tmp_path / "epoch_9.pth", tmp_path / "new" / "vit.safetensors", tmp_path / "back.pth"
    write_weights(ours, classifier.state_dict())
    convert(monkeypatch, "mm", "timm", ours, theirs)
    values = sum(value.numel() for value in classifier.state_dict().values())
    assert re.search(
        rf"wrote {theirs}: \d+ tensors, {values:,} values, names of timm", capsys.readouterr().out
    )
    convert(monkeypatch, "timm", "mm", theirs, back)
    assert_same_weights(torch.load(back, weights_only=True)["state_dict"], classifier.state_dict())


@pytest.mark.parametrize("options", [{}, dict(no_embed_class=True)])
def test_positions_are_told_apart_by_the_number_of_patches(options, told):
    """Those of 4 x 6 patches and a class token are as many as those of a square of 5 x 5 patches alone."""
    size = (20, 20) if options else (16, 24)
    vit = randomised(timm_vit(num_classes=0, img_size=size, **options))
    own = timm_to_mm(vit.state_dict(), num_patches=size[0] * size[1] // 16)
    ours = MaPeTViT(ARCH, size, 4, out_type="raw", pretrained_grid=(size[0] // 4, size[1] // 4)).eval()
    ours.load_state_dict({name.removeprefix("backbone."): value for name, value in own.items()})
    images = torch.randn(2, 3, *size)
    torch.testing.assert_close(ours(images)[0], vit.forward_features(images), rtol=1e-5, atol=1e-5)
    assert len(told) == len(options)

    timm_to_mm(vit.state_dict())
    assert "mapet_mm.interop.convert.timm_to_mm(weights, num_patches=24)" in told[-1]


def test_the_tool_converts_an_oblong_grid_there_and_back(tmp_path, monkeypatch):
    """A .safetensors file of this package says how many patches its network has."""
    backbone = MaPeTViT(ARCH, (16, 24), 4)
    weights = {f"backbone.{name}": value for name, value in backbone.state_dict().items()}
    recipe = dict(
        model=dict(backbone=dict(arch=ARCH, img_size=(16, 24), patch_size=4)),
        data_preprocessor=dict(mean=[127.5] * 3, std=[127.5] * 3, to_rgb=True),
    )
    ours, theirs, back = tmp_path / "ours.pth", tmp_path / "vit.safetensors", tmp_path / "back.pth"
    write_weights(ours, weights, dict(cfg=Config(recipe).pretty_text))
    convert(monkeypatch, "mm", "timm", ours, theirs)
    convert(monkeypatch, "timm", "mm", theirs, back)
    assert_same_weights(torch.load(back, weights_only=True)["state_dict"], weights)


@pytest.mark.parametrize(
    ("source", "output", "match"),
    [
        ("timm", "out.pth", r"error: .*in.pth: `backbone.cls_token`: MaPeTViT has nothing of this name"),
        ("mm", "out.npz", r"error: .*out.npz: the name has to end in .safetensors or .pth"),
    ],
)
def test_the_tool_says_what_is_wrong_in_one_line(source, output, match, tmp_path, monkeypatch):
    write_weights(tmp_path / "in.pth", {"backbone.cls_token": torch.zeros(1, 1, 3)})
    with pytest.raises(SystemExit, match=match):
        convert(monkeypatch, source, "mm", tmp_path / "in.pth", tmp_path / output)
    assert not (tmp_path / output).exists()
