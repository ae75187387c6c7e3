"""Pictures of features: colours tell groups of patches apart, and neighbours are the nearest images."""

import numpy as np
import pytest
import timm
import torch
from foreign_models import SIDE, VIT
from torch import nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTModel

from mapet_mm.evaluation.tokens import TokenBackbone, layer_outputs
from mapet_mm.models import MaPeTPretrainViT
from mapet_mm.visualization.features import (
    OTHER_CLASS,
    SAME_CLASS,
    LastAttention,
    nearest_images,
    neighbours_figure,
    patches_figure,
    principal_colours,
)

PICTURE = np.zeros((8, 8, 3), np.uint8)


def test_patches_of_one_kind_have_one_colour_and_the_sign_is_fixed():
    """Two images, whose left halves are of one kind and right halves of another."""
    kinds = torch.tensor([[3.0, 0, 0, 0, 0], [0, 0, 0, 0, 3.0]])
    tokens = kinds[torch.tensor([0, 0, 1, 1])].expand(2, 4, 4, 5)
    tokens = tokens + 0.01 * torch.randn(2, 4, 4, 5, generator=torch.Generator().manual_seed(0))
    colours = principal_colours(tokens)
    assert colours.shape == (2, 4, 4, 3)
    assert (colours.min(), colours.max()) == (0, 1)
    left, right = colours[..., :2, 0], colours[..., 2:, 0]
    assert abs(left.mean() - right.mean()) > 0.9
    assert max(left.std(), right.std()) < 0.05
    # Of features turned upside down, the same directions are named: colours change places.
    np.testing.assert_allclose(principal_colours(-tokens)[..., 0], 1 - colours[..., 0], atol=1e-6)


@pytest.mark.parametrize("mask", [None, "bias", "bool"])
def test_the_class_tokens_attention_is_the_softmax_of_its_products(mask):
    """Two heads; a class token and a register before 2 x 3 patches; some arguments by name."""
    queries, keys, values = torch.randn(3, 4, 2, 8, 5, generator=torch.Generator().manual_seed(0))
    masks = {"bias": torch.randn(2, 8, 8), "bool": torch.rand(8, 8) < 0.7, None: None}
    products = 0.3 * queries @ keys.mT
    if mask == "bias":
        products = products + masks[mask]
    elif mask == "bool":
        masks[mask][:, 0] = True  # each sees one at least
        products = products.masked_fill(~masks[mask], -torch.inf)
    with LastAttention() as last:
        F.scaled_dot_product_attention(values, values, values)
        F.scaled_dot_product_attention(queries, key=keys, value=values, attn_mask=masks[mask], scale=0.3)
    expected = products.softmax(3).mean(1)[:, 0, 2:].unflatten(1, (2, 3))
    torch.testing.assert_close(last.of_class_token((2, 3)), expected)
    assert LastAttention().of_class_token((2, 3)) is None


def weights_of_timm(images: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    network = timm.create_model("vit_tiny_patch16_224", **VIT).eval()
    last = network.blocks[-1].attn
    last.fused_attn = False
    found = []
    last.attn_drop.register_forward_pre_hook(lambda _, inputs: found.append(*inputs))
    network(images)
    last.fused_attn = True
    return network, found[0]


def weights_of_hugging_face(images: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48)
    config = ViTConfig(**sizes, image_size=SIDE, patch_size=7)
    network = ViTModel(config).eval()
    network.set_attn_implementation("eager")
    found = network(images, output_attentions=True).attentions[-1]
    network.set_attn_implementation("sdpa")
    return network, found


def weights_of_two_streams(images: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    arch = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=48)
    network = MaPeTPretrainViT(arch=arch, img_size=SIDE, patch_size=7, cutting_point=5).eval()
    (projected,) = layer_outputs([network.layers[-1].attn.qkv], lambda: network.encode(images))
    queries, keys, _ = projected.unflatten(2, (3, 3, 8)).permute(2, 0, 3, 1, 4)
    return network, (queries @ keys.mT / 8**0.5).softmax(3)


@pytest.mark.parametrize("library", [weights_of_timm, weights_of_hugging_face, weights_of_two_streams])
@torch.no_grad()
def test_the_last_layers_attention_is_found_in_each_library(library):
    """4 x 4 patches; timm's ViT has two registers before them."""
    torch.manual_seed(0)
    images = torch.randn(2, 3, SIDE, SIDE)
    network, weights = library(images)
    backbone = TokenBackbone(network)
    with LastAttention() as last:
        tokens = backbone(images)
    expected = weights.mean(1)[:, 0, -16:].unflatten(1, (4, 4))
    torch.testing.assert_close(last.of_class_token(tokens.grid), expected)


def test_neighbours_are_those_of_the_highest_cosine_without_the_image_itself():
    known = torch.tensor([[1.0, 0], [3, 0.3], [0, 1], [-1, 0]])
    images, cosines = nearest_images(known[:1], known, 2, itself=True)
    assert images.tolist() == [[1, 2]]
    assert cosines[0].tolist() == pytest.approx([1 / 1.01**0.5, 0])
    assert nearest_images(known[:1], known, 9)[0].tolist() == [[0, 1, 2, 3]]


def test_frames_say_whether_a_neighbour_is_of_the_same_class():
    figure = neighbours_figure(
        [PICTURE] * 2, [[PICTURE] * 2] * 2, torch.tensor([[0.9, 0.8], [0.7, 0.6]]), [[True, False]] * 2
    )
    cells = np.array(figure.axes).reshape(2, 3)
    for line in cells:
        frames = [axes.spines["top"].get_edgecolor() for axes in line[1:]]
        assert frames[0] != frames[1]
        assert not line[0].get_frame_on()
    assert [text.get_text() for axes in cells[0, 1:] for text in axes.texts] == ["0.90", "0.80"]
    assert SAME_CLASS != OTHER_CLASS


def test_names_of_models_are_no_formulas():
    """A file may be called `$x_$`, which a formula would be broken by."""
    figure = patches_figure([PICTURE], {"$x_$ " + "long " * 9: np.zeros((1, 4, 4, 3))})
    assert figure.axes[1].get_ylabel() == "$x_$ long long lo…"
    figure.canvas.draw()
