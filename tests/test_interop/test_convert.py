"""Converted weights give the same outputs in timm's, Hugging Face's and torchvision's networks."""

import numpy as np
import pytest
import timm
import torch
import torchvision
import transformers
from mmpretrain.registry import MODELS
from small_vit import randomise
from torch import nn

from mapet_mm.convert import (
    hf_to_mm,
    mm_to_hf,
    mm_to_reference,
    mm_to_timm,
    mm_to_torchvision,
    reference_to_mm,
    timm_to_mm,
)
from mapet_mm.interop.convert import as_start, complete
from mapet_mm.models import MaPeT, MaPeTPretrainViT, MaPeTViT
from mapet_mm.models.backbones.checkpoint_hooks import fold_layer_scale
from mapet_mm.weight_files import write_weights

ARCH = dict(embed_dims=24, num_layers=3, num_heads=3, feedforward_channels=96)
OWN = dict(arch=ARCH, img_size=20, patch_size=4)


@pytest.fixture
def pretrained() -> dict[str, torch.Tensor]:
    model = MaPeT(
        backbone=dict(type="mapet_mm.MaPeTPretrainViT", cutting_point=8, **OWN),
        head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=24, vocab_size=32),
        target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=32),
    )
    return randomise(model).state_dict()


@pytest.fixture
def classifier() -> nn.Module:
    backbone = dict(type="mapet_mm.MaPeTViT", out_type="avg_featmap", final_norm=False, **OWN)
    head = dict(type="LinearClsHead", num_classes=7, in_channels=24)
    return randomise(MODELS.build(dict(type="ImageClassifier", backbone=backbone, head=head)))


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 20, 20)


def tokens_of(weights: dict[str, torch.Tensor], images: torch.Tensor, **options) -> torch.Tensor:
    """Class token and patches after the final norm of a plain ViT that has the backbone's weights."""
    vit = MaPeTViT(**{**OWN, "out_type": "raw", **options}).eval()
    own = {k.removeprefix("backbone."): v for k, v in weights.items() if k.startswith("backbone.")}
    own.pop("mask_token", None)
    vit.load_state_dict(own)
    return vit(images)[0]


def assert_same(ours: dict, others: dict) -> None:
    assert set(ours) == set(others)
    for name, value in ours.items():
        assert torch.equal(value, others[name]), name


def timm_vit(**options) -> nn.Module:
    sizes = dict(
        img_size=20, patch_size=4, embed_dim=24, depth=3, num_heads=3, init_values=0.1, num_classes=0
    )
    return timm.models.VisionTransformer(**sizes | options).eval()


def dinov2_config(**options) -> transformers.Dinov2Config:
    sizes = dict(hidden_size=24, num_hidden_layers=3, num_attention_heads=3, image_size=20, patch_size=4)
    return transformers.Dinov2Config(**sizes, mlp_ratio=4, **options)


def in_timm(weights, images, folder):
    vit = timm_vit()
    vit.load_state_dict(mm_to_timm(weights), strict=True)
    return vit.forward_features(images)


def in_hugging_face(weights, images, folder):
    """By a folder as on the Hub, whose names every version of transformers knows."""
    dinov2_config().save_pretrained(folder)
    write_weights(folder / "model.safetensors", mm_to_hf(weights))
    vit, report = transformers.Dinov2Model.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return vit.eval()(images).last_hidden_state


def in_torchvision(weights, images, folder):
    """Its class token alone."""
    norm = torch.nn.LayerNorm
    vit = torchvision.models.VisionTransformer(20, 4, 3, 3, 24, 96, norm_layer=lambda dim: norm(dim, 1e-6))
    vit.heads = nn.Identity()
    vit.load_state_dict(mm_to_torchvision(weights), strict=True)
    return vit.eval()(images)[:, None]


@torch.no_grad()
@pytest.mark.parametrize("other", [in_timm, in_hugging_face, in_torchvision])
def test_other_libraries_give_the_same_tokens(other, pretrained, images, tmp_path):
    found = other(pretrained, images, tmp_path)
    expected = tokens_of(pretrained, images)[:, : found.shape[1]]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


ROUND_TRIPS = {"reference": (mm_to_reference, reference_to_mm), "timm": (mm_to_timm, timm_to_mm)}
ROUND_TRIPS["hf"] = (mm_to_hf, hf_to_mm)


@pytest.mark.parametrize("target", ROUND_TRIPS)
@pytest.mark.parametrize(
    "wrap", ["backbone.", "", "module.backbone.", "backbone._orig_mod.", "_orig_mod.module.backbone."]
)
def test_a_backbone_converts_there_and_back_under_every_wrapper(wrap, target, pretrained):
    to, back = ROUND_TRIPS[target]
    backbone = {k: v for k, v in pretrained.items() if k.startswith("backbone.")}
    if target == "timm":
        del backbone["backbone.mask_token"]
    wrapped = {wrap + name.removeprefix("backbone."): value for name, value in backbone.items()}
    assert_same(back(to(wrapped)), backbone)


@pytest.mark.parametrize("convert", [mm_to_reference, mm_to_timm, mm_to_hf, mm_to_torchvision])
def test_a_pre_trainings_predictor_is_left_out(convert, pretrained):
    predictor = {"neck.norm.weight": torch.ones(24)}
    assert_same(convert(pretrained | predictor), convert(pretrained))


@torch.no_grad()
def test_a_classifier_gives_the_same_classes_in_timm_and_has_the_authors_names(classifier, images):
    ours = classifier.state_dict()
    vit = timm_vit(num_classes=7, global_pool="avg")
    vit.load_state_dict(mm_to_timm(ours), strict=True)
    expected = classifier.head(classifier.extract_feat(images))
    torch.testing.assert_close(vit(images), expected, rtol=1e-5, atol=1e-5)
    assert {"fc_norm.weight", "head.bias", "blocks.2.attn.kv.bias"} <= set(mm_to_reference(ours))
    for to, back in (ROUND_TRIPS["timm"], ROUND_TRIPS["reference"]):
        assert_same(back(to(ours)), ours)


def test_the_authors_names_convert_both_ways(data_dir):
    golden = np.load(data_dir / "mapet_reference_d48.npz")
    theirs = {k[2:]: torch.from_numpy(golden[k]) for k in golden.files if k.startswith("w/")}
    ours = reference_to_mm({f"module.{name}": value for name, value in theirs.items()})
    assert_same(mm_to_reference(ours), theirs)
    image, patch, dim, depth, heads, cutting_point, _ = golden["meta"].tolist()
    arch = dict(embed_dims=dim, num_layers=depth, num_heads=heads, feedforward_channels=4 * dim)
    vit = MaPeTPretrainViT(arch, image, patch, cutting_point)
    assert {f"backbone.{name}" for name in vit.state_dict()} == {n for n in ours if n.startswith("backbone.")}


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "num_patches"),
    [
        (dict(init_values=None), None),
        (dict(qkv_bias=False), None),
        (dict(no_embed_class=True), 25),
        (dict(class_token=False, global_pool="avg", fc_norm=False), None),
        (dict(img_size=(16, 24)), 24),
    ],
)
def test_a_vit_of_timm_with_less_gives_the_same_tokens(options, num_patches):
    vit = randomise(timm_vit(**options))
    height, width = size = options.get("img_size", (20, 20))
    images = torch.randn(2, 3, *size)
    grid = dict(img_size=size, pretrained_grid=(height // 4, width // 4))
    grid["with_cls_token"] = "class_token" not in options
    found = tokens_of(timm_to_mm(vit.state_dict(), num_patches), images, **grid)
    torch.testing.assert_close(found, vit.forward_features(images), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_beit_of_mmpretrain_gives_the_same_tokens_in_timm(images):
    plain = dict(use_abs_pos_emb=True, use_rel_pos_bias=False, use_shared_rel_pos_bias=False)
    options = dict(layer_scale_init_value=0.1, out_type="raw", final_norm=True)
    vit = randomise(MODELS.build(dict(type="mmpretrain.BEiTViT", **OWN, **plain, **options)))
    theirs = timm_vit()
    theirs.load_state_dict(mm_to_timm(vit.state_dict()))
    torch.testing.assert_close(theirs.forward_features(images), vit(images)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", ["backbone.ln1", "backbone.ln2", "backbone.layers.0.ln2"])
def test_a_norm_without_a_bias_gets_zeros(norm, pretrained):
    """Also `fc_norm`, the norm of the mean that a fine-tuned network has."""
    weights = {**pretrained, f"{norm}.weight": torch.full((24,), 2.0)}
    weights.pop(f"{norm}.bias", None)
    assert complete(weights)[f"{norm}.bias"].tolist() == [0.0] * 24


def test_layer_scale_left_out_is_one_in_every_direction(pretrained):
    without = {name: value for name, value in pretrained.items() if "gamma" not in name}
    ones = {n: torch.ones_like(v) if "gamma" in n else v for n, v in pretrained.items()}
    for to, _ in ROUND_TRIPS.values():
        assert_same(to(without), to(ones))
    theirs = {name: v for name, v in mm_to_reference(ones).items() if ".ls" not in name}
    assert_same(reference_to_mm(theirs), ones)


def test_layer_scale_is_folded_in_float32():
    """In float16 a small scale times a weight has few digits left, or none."""
    weight, scale = torch.randn(4, 4).half(), torch.full((4,), 1e-5).half()
    layer = "backbone.layers.0.attn."
    half = {f"{layer}proj.weight": weight, f"{layer}proj.bias": weight[0], f"{layer}gamma1.weight": scale}
    folded = fold_layer_scale(half)
    assert len(folded) == 2
    expected = weight.double() * scale.double()
    torch.testing.assert_close(folded[f"{layer}proj.weight"].double(), expected, rtol=1e-6, atol=0)


def without(weights: dict, name: str) -> dict:
    return {key: value for key, value in weights.items() if not key.startswith(name)}


def own(**options) -> dict:
    return MaPeTViT(**OWN, **options).state_dict()


def backbone_with(*names: str) -> dict:
    """The weights of a backbone and, under these names, of other parts of a model."""
    parts = dict.fromkeys(names, torch.ones(1))
    return {f"backbone.{name}": value for name, value in own().items()} | parts


REFUSED = [
    (lambda: timm_to_mm(timm_vit(reg_tokens=4).state_dict()), "`reg_token`"),
    (lambda: timm_to_mm(timm_vit(qk_norm=True).state_dict()), "`blocks.0.attn.q_norm.weight`"),
    (lambda: timm_to_mm(timm_vit(mlp_layer=timm.layers.SwiGLU).state_dict()), "`blocks.0.mlp.fc1_g.weight`"),
    (lambda: timm_to_mm(timm_vit(pos_embed="none").state_dict()), r"`backbone.pos_embed` .* missing"),
    (lambda: timm_to_mm(timm_vit(no_embed_class=True).state_dict()), "num_patches"),
    (lambda: timm_to_mm(timm_vit(img_size=(24, 32)).state_dict()), "48 patches .* 49 patches"),
    (lambda: hf_to_mm({"embeddings.register_tokens": torch.zeros(1, 4, 24)}), "register_tokens"),
    (lambda: reference_to_mm({"blocks.0.attn.q.bias": torch.ones(3)}), "`blocks.0.attn.kv.bias` is missing"),
    (lambda: mm_to_timm(own(layer_cfgs=dict(ffn_type="swiglu_fused"))), r"`backbone\.layers\.0\.ffn\."),
    (lambda: mm_to_reference(own(pre_norm=True)), r"pre_norm\.weight"),
    (lambda: mm_to_hf(own(final_norm=False)), "`backbone.ln1.weight`"),
    (lambda: mm_to_reference(without(own(), "cls_token")), "`backbone.cls_token`"),
    (lambda: mm_to_timm(without(own(), "layers.1.")), "`backbone.layers.1.ln1.weight` .* missing"),
    (lambda: mm_to_timm(backbone_with("teacher.w")), "`teacher.w`"),
    (lambda: mm_to_timm(backbone_with("head.fc.weight", "neck.w")), "`neck.w`"),
]


@pytest.mark.parametrize(("convert", "name"), REFUSED)
def test_weights_that_do_not_fit_are_refused_by_name(convert, name):
    with pytest.raises(ValueError, match=name):
        convert()


@torch.no_grad()
def test_weights_to_start_from_are_taken_under_any_names(pretrained, images):
    expected = tokens_of(pretrained, images)
    decoder = {"decoder_embed.weight": torch.ones(2, 2), "head.weight": torch.ones(7, 24)}
    of_timm = {f"module.{name}": value for name, value in mm_to_timm(pretrained).items()} | decoder
    for weights, line in (
        (pretrained, "names of mm"),
        (of_timm, "names of timm, without dec"),
        (mm_to_hf(pretrained), "names of hf"),
        (mm_to_reference(pretrained), "names of reference"),
    ):
        backbone, told = as_start(weights)
        assert told.startswith(line)
        torch.testing.assert_close(tokens_of(backbone, images), expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"timm: .*hf: .*reference: "):
        as_start({"conv1.weight": torch.ones(1)})
