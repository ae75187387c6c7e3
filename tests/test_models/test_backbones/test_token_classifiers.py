"""Tokens as the only input: the MLP by hand, the ViT against the plain one."""

import pytest
import torch
from torch.nn import functional as F

from mapet_mm.models import MaPeTViT, OneHotTokens, TokenMLP, TokenViT

ARCH = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=48)


def test_mlp_is_embedding_linear_relu_mean():
    mlp = TokenMLP(vocab_size=7, embed_dims=5)
    grid = torch.tensor([[[1, 1], [6, 0]]])
    embedded = mlp.embedding.weight[[1, 1, 6, 0]]
    hidden = (embedded @ mlp.linear.weight.T + mlp.linear.bias).clamp(min=0)
    (features,) = mlp(grid)
    torch.testing.assert_close(features, hidden.mean(0, keepdim=True), rtol=1e-6, atol=1e-6)


def test_one_hot_tokens_say_which_token_each_place_has():
    grid = torch.tensor([[[[2.0, 0.0]]], [[[1.0, 1.0]]]])  # as a pipeline packs them, B 1 1 2
    (features,) = OneHotTokens(vocab_size=3)(grid)
    assert features.tolist() == [[0, 0, 1, 1, 0, 0], [0, 1, 0, 0, 1, 0]]


def test_vit_is_the_plain_one_on_token_embeddings():
    """With embeddings as 'pixels' and an identity patch embedding, MaPeTViT gives the same features."""
    ours = TokenViT(vocab_size=11, grid=4, arch=ARCH, out_type="avg_featmap", final_norm=False).eval()
    ours.init_weights()
    plain = MaPeTViT(ARCH, 4, 1, in_channels=24, out_type="avg_featmap", final_norm=False).eval()
    weights = {name: w for name, w in ours.state_dict().items() if not name.startswith("patch_embed")}
    weights["patch_embed.projection.weight"] = torch.eye(24)[..., None, None]
    weights["patch_embed.projection.bias"] = torch.zeros(24)
    plain.load_state_dict(weights)
    grid = torch.randint(11, (3, 4, 4))
    pixels = F.embedding(grid, ours.patch_embed.weight).permute(0, 3, 1, 2)
    torch.testing.assert_close(ours(grid)[0], plain(pixels)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_grids_come_as_a_pipeline_packs_them(dtype):
    """MMPretrain adds a channel and hands everything on as floats."""
    mlp = TokenMLP(vocab_size=8192, embed_dims=5)
    grid = torch.randint(8192, (2, 3, 3))
    assert torch.equal(mlp(grid[:, None].to(dtype))[0], mlp(grid)[0])


def test_token_ids_can_be_oblong_grids():
    vit = TokenViT(vocab_size=11, grid=(2, 4), arch=ARCH, out_type="featmap")
    assert vit(torch.randint(11, (3, 2, 4)))[0].shape == (3, 24, 2, 4)
