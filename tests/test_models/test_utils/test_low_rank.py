"""Low-rank adapters: what they add, what is trained, and that a state dict has the sums."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from mapet_mm.cli.change import changed
from mapet_mm.convert import mm_to_hf, mm_to_timm
from mapet_mm.models import MaPeT, MaPeTViT, TIMMViT
from mapet_mm.models.utils.low_rank import ALPHA, RANK
from mapet_mm.registry import MODELS

ARCH = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=48)
OURS = dict(type="mapet_mm.MaPeTPretrainViT", arch=ARCH, img_size=20, patch_size=4, cutting_point=8)
SMALL = dict(img_size=20, patch_size=4, embed_dim=24, depth=2, num_heads=3)
OF_TIMM = dict(type="mapet_mm.MaPeTPretrainTIMM", cutting_point=8, **SMALL)
APART = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.proj")
JOINT = ("attn.qkv", "attn.proj")
KINDS = {
    "ours": (OURS, "layers", JOINT),
    "timm": (dict(OF_TIMM, model_name="vit_tiny_patch16_224"), "timm_model.blocks", JOINT),
    "dinov3": (dict(OF_TIMM, model_name="vit_small_patch16_dinov3"), "timm_model.blocks", JOINT),
    "eva02": (
        dict(OF_TIMM, model_name="eva02_tiny_patch14_224", qkv_fused=False),
        "timm_model.blocks",
        APART,
    ),
}


def build(backbone: dict, train_backbone: str) -> MaPeT:
    """With weights none of which is small."""
    model = MODELS.build(
        dict(
            type="mapet_mm.MaPeT",
            backbone=backbone,
            head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=24, vocab_size=11),
            target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=11),
            train_backbone=train_backbone,
        )
    )
    for name, parameter in model.named_parameters():
        if not name.endswith((".A", ".B")):
            nn.init.normal_(parameter, std=0.3)
    return model


def train(model: MaPeT, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    inputs = [torch.randn(3, 3, 20, 20), torch.randint(11, (3, 5, 5))]
    for _ in range(steps):  # in the first, A has no gradient but zeros
        optimizer.zero_grad()
        model(inputs, mode="loss")["loss"].backward()
        optimizer.step()


def two_streams(model: MaPeT, images: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    return model.eval().backbone(images)[0]


@pytest.mark.parametrize(("backbone", "layers", "projections"), KINDS.values(), ids=KINDS)
def test_adapters_mask_token_and_head_alone_are_trained_and_saved_in_the_weights(
    backbone, layers, projections
):
    start = build(dict(backbone), "all")
    model = build(dict(backbone), "lora")
    model.load_state_dict(start.state_dict())
    images = torch.randn(2, 3, 20, 20)
    assert torch.equal(two_streams(model, images), two_streams(start, images))

    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    train(model.train())
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    paths = [f"backbone.{layers}.{index}.{name}" for index in (0, 1) for name in projections]
    adapters = {f"{path}.parametrizations.weight.0.{part}" for path in paths for part in "AB"}
    assert changed == {*adapters, "backbone.mask_token", "head.projection.weight", "head.projection.bias"}

    # A checkpoint has the names of a model that was trained as a whole, and computes the same.
    saved = model.state_dict()
    own = {name: value for name, value in saved.items() if not name.startswith("adapters.")}
    for path in paths:
        update = saved[f"adapters.{path}.parametrizations.weight.0.B"]
        update = ALPHA / RANK * (update @ saved[f"adapters.{path}.parametrizations.weight.0.A"])
        assert torch.equal(own[f"{path}.weight"], start.state_dict()[f"{path}.weight"] + update)
    start.load_state_dict(own)
    assert torch.equal(two_streams(start, images), two_streams(model, images))

    # Loaded again, the adapters are those that were trained.
    again = build(dict(backbone), "lora")
    again.load_state_dict(saved)
    for name, value in model.named_parameters():
        assert torch.equal(again.get_parameter(name), value)
    again.load_state_dict(own, strict=False)  # and without them, nothing is added
    assert torch.equal(two_streams(again, images), two_streams(model, images))


PLAIN = {
    "ours": lambda **init: MaPeTViT(ARCH, img_size=20, patch_size=4, out_type="featmap", **init),
    "timm": lambda **init: TIMMViT("vit_tiny_patch16_224", **SMALL, **init),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_an_init_cfg_takes_a_start_into_a_training_with_adapters_and_its_weights_out_of_it(kind, tmp_path):
    init_cfg = dict(type="Pretrained", checkpoint=str(tmp_path / "weights.pth"), prefix="backbone.")
    backbone, _, _ = KINDS[kind]
    start = build(dict(backbone), "all")
    torch.save(dict(state_dict=start.state_dict()), tmp_path / "weights.pth")
    model = build(dict(backbone, init_cfg=init_cfg), "lora")
    model.init_weights()
    images = torch.randn(2, 3, 20, 20)
    assert torch.equal(two_streams(model, images), two_streams(start, images))

    train(model.train())
    torch.save(dict(state_dict=model.state_dict()), tmp_path / "weights.pth")
    plain = PLAIN[kind](init_cfg=init_cfg)
    plain.init_weights()
    plain.eval()
    (expected,) = model.eval().backbone.encode(images)
    (features,) = plain(images)
    torch.testing.assert_close(features.flatten(2).mT, expected[:, 1:], rtol=1e-5, atol=1e-5)


def test_exports_and_shares_of_the_change_have_no_adapters():
    start = build(dict(OURS), "all").state_dict()
    model = build(dict(OURS), "lora")
    model.load_state_dict(start)
    train(model)
    saved = model.state_dict()
    for convert in (mm_to_timm, mm_to_hf):
        before, after = convert(start), convert(saved)
        assert before.keys() == after.keys()
        different = {name for name in after if not torch.equal(before[name], after[name])}
        assert all("attn." in name or "attention." in name or "mask" in name for name in different)
    half = changed(start, saved, 0.5)
    assert half.keys() == start.keys()
    name = "backbone.layers.1.attn.qkv.weight"
    assert torch.equal(half[name], start[name].lerp(saved[name], 0.5))


COMPILED = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from test_low_rank import KINDS, build
for backbone, _, _ in KINDS.values():
    vit = build(dict(backbone), "lora").backbone
    compiled = torch.compile(vit, backend="eager", fullgraph=True)
    images, permutation = torch.randn(2, 3, 20, 20), vit.sample_permutation(2, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(images, permutation)[0], vit(images, permutation)[0])
"""


@pytest.mark.slow
def test_a_backbone_with_adapters_is_one_graph():
    """In a process of its own: the shape checks of the tests are no part of the graph."""
    command = [sys.executable, "-W", "ignore", "-c", COMPILED, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_autocast_rounds_no_update():
    linear = build(dict(OURS), "lora").backbone.layers[0].attn.qkv
    nn.init.normal_(linear.parametrizations.weight[0].B)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = linear.weight
    assert torch.equal(rounded, linear.weight)


def test_the_number_of_trained_weights_is_said(capture_log):
    build(dict(OURS), "lora")
    num_trained = 2 * RANK * (24 + 3 * 24 + 24 + 24) + 24  # two layers' qkv and projection, the mask token
    assert f"train_backbone='lora': {num_trained:,} of the backbone's" in capture_log()
