"""An encoder of the visible patches and its predictor: by value, and who sees whom."""

import pytest
import torch
from small_pretraining import ARCH, VISIBLE, batch, build
from torch.nn import functional as F

from mapet_mm.models import CrossAttentionPredictor

SIZE = dict(img_size=20, patch_size=4)
TIMM = dict(type="mapet_mm.MaPeTPretrainTIMM", embed_dim=24, depth=2, num_heads=3, **SIZE)


def naive_cross_attention(layer, rows, context):
    """The layer from its weights, head by head and row by row."""
    attention = layer.attn
    queries, keys, values = attention.in_proj_weight.chunk(3)
    query_bias, key_bias, value_bias = attention.in_proj_bias.chunk(3)
    normed = F.layer_norm(rows, rows.shape[-1:], layer.ln1.weight, layer.ln1.bias, eps=1e-6)
    channels = rows.shape[-1] // attention.num_heads
    heads = []
    for head in range(attention.num_heads):
        part = slice(head * channels, (head + 1) * channels)
        q = F.linear(normed, queries[part], query_bias[part])
        k = F.linear(context, keys[part], key_bias[part])
        v = F.linear(context, values[part], value_bias[part])
        weights = (q @ k.transpose(1, 2) / channels**0.5).softmax(-1)
        heads.append(weights @ v)
    joined = torch.cat(heads, dim=-1)
    rows = rows + F.linear(joined, attention.out_proj.weight, attention.out_proj.bias)
    hidden, out = layer.ffn.layers[0][0], layer.ffn.layers[1]
    normed = F.layer_norm(rows, rows.shape[-1:], layer.ln2.weight, layer.ln2.bias, eps=1e-6)
    return rows + F.linear(F.gelu(F.linear(normed, hidden.weight, hidden.bias)), out.weight, out.bias)


def test_the_predictor_equals_a_naive_one():
    predictor = CrossAttentionPredictor(embed_dims=24, num_layers=2, num_heads=3)
    for parameter in predictor.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    queries, context = torch.randn(2, 5, 24), torch.randn(2, 7, 24)
    rows = queries
    for layer in predictor.layers:
        rows = naive_cross_attention(layer, rows, context)
    expected = F.layer_norm(rows, (24,), predictor.norm.weight, predictor.norm.bias, eps=1e-6)
    torch.testing.assert_close(predictor(queries, context), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_hidden_patch_changes_nothing_and_a_visible_one_all_predictions():
    model = build("visible").eval()
    images, _ = batch()
    permutation = model.backbone.sample_permutation(3, "cpu")
    before, _ = model.latents(images, permutation, with_context=True)
    for rank in range(1, 26):
        patches = permutation[:, rank] - 1
        changed = images.clone()
        for image, patch in zip(changed, patches.tolist(), strict=True):
            row, column = 4 * (patch // 5), 4 * (patch % 5)
            image[:, row : row + 4, column : column + 4] += 1.0
        after, _ = model.latents(changed, permutation, with_context=True)
        is_same = (before == after).all(-1)  # B 25
        assert is_same.all() if rank > VISIBLE else not is_same.any(), rank


@torch.no_grad()
def test_a_prediction_depends_on_its_own_position_alone():
    """The hidden patches in another order: the same predictions in that order."""
    model = build("visible").eval()
    images, _ = batch()
    permutation = model.backbone.sample_permutation(3, "cpu")
    latents, _ = model.latents(images, permutation)
    order = torch.randperm(25 - VISIBLE)
    shuffled = torch.cat([permutation[:, : 1 + VISIBLE], permutation[:, 1 + VISIBLE :][:, order]], dim=1)
    other, _ = model.latents(images, shuffled)
    torch.testing.assert_close(other, latents[:, order])
    assert (latents[:, :1] - latents[:, 1:]).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize(
    "vit",
    [
        dict(TIMM, model_name="vit_tiny_patch16_224", reg_tokens=2),
        dict(TIMM, model_name="vit_small_patch16_dinov3"),
    ],
    ids=["registers", "DINOv3"],
)
def test_timms_vits_learn_as_its_encoder(vit):
    """With rotary positions, and with registers, which are context and have no token."""
    model = build("visible", backbone=dict(vit, objective="context", cutting_point=10))
    losses = model(batch(), mode="loss")
    losses["loss"].backward()
    assert losses["loss"].isfinite()
    unused = [name for name, p in model.named_parameters() if p.grad is None]
    assert unused == []


def test_a_query_says_its_row_and_its_column():
    """Along the rows, as patches are counted: half of the channels have the row, half the column."""
    vit = dict(type="mapet_mm.MaPeTPretrainViT", arch=ARCH, img_size=(8, 12), patch_size=4)
    model = build("visible", backbone=dict(vit, objective="context", cutting_point=3))
    of_rows, of_columns = model.query_positions.view(2, 3, 2, 12).unbind(2)
    assert torch.equal(of_rows, of_rows[:, :1].expand(2, 3, 12))
    assert torch.equal(of_columns, of_columns[:1].expand(2, 3, 12))
    assert len(model.query_positions.unique(dim=0)) == 6


@pytest.mark.parametrize(("kind", "objective"), [("visible", "mim"), ("mim", "context")])
def test_the_objective_has_to_be_the_algorithms(kind, objective):
    vit = dict(type="mapet_mm.MaPeTPretrainViT", arch=ARCH, objective=objective, cutting_point=10, **SIZE)
    with pytest.raises(ValueError, match=f"objective='{objective}'"):
        build(kind, backbone=vit)


def test_weights_go_to_the_plain_vit():
    """The encoder's parameters are those of any MaPeTPretrainViT: downstream nothing is different."""
    names = {name for name in build("visible").state_dict() if name.startswith("backbone.")}
    assert names == {name for name in build("mim").state_dict() if name.startswith("backbone.")}


@pytest.mark.parametrize("mode", ["tensor", "predict"])
def test_validation_and_tensors_go_through_the_predictor(mode, monkeypatch):
    model = build("visible").eval()
    calls = []
    monkeypatch.setattr(
        model.neck, "forward", lambda queries, context: calls.append(queries.shape) or queries
    )
    model(batch(), mode=mode)
    assert calls == [(3, 25 - VISIBLE, 24)]
