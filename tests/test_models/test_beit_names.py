"""Checkpoints of MMPretrain's BEiT and CAE in a plain ViT: the same network, the same numbers."""

import pytest
import torch
from mmpretrain.models.selfsup import BEiTPretrainViT, CAEPretrainViT

from mapet_mm.models import MaPeTViT
from mapet_mm.models.utils.beit_names import beit_to_vit

ARCH = dict(embed_dims=48, num_layers=3, num_heads=3, feedforward_channels=96)
PLAIN = dict(use_abs_pos_emb=True, use_rel_pos_bias=False, use_shared_rel_pos_bias=False)


def randomise(module: torch.nn.Module) -> torch.nn.Module:
    """Weights that are far from their initial values, so that none can be exchanged unnoticed."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    module.eval()  # MMPretrain's backbones return nothing here
    return module


@pytest.mark.parametrize("bias", [True, "qv_bias"])
@pytest.mark.parametrize("family", [BEiTPretrainViT, CAEPretrainViT])
def test_plain_vit_computes_what_the_checkpoint_computed(family, bias, capture_log):
    """Every token of the last layer, to 1e-6, and no parameter missing or left over but the mask token."""
    options = dict(layer_cfgs=dict(bias=bias)) if family is BEiTPretrainViT else dict(bias=bias)
    beit = randomise(family(ARCH, 24, 4, layer_scale_init_value=0.1, **{**PLAIN, **options}))
    vit = MaPeTViT(ARCH, 24, 4, out_type="raw").eval()
    missing, unexpected = vit.load_state_dict(beit.state_dict(), strict=False)
    assert not missing
    assert not unexpected
    images = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        expected, actual = beit(images, mask=None)[0], vit(images)[0]
    assert actual.shape == (2, 37, 48)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert "Renamed the parameters of 3 BEiT layers" in capture_log()


def test_a_checkpoint_without_layer_scale_keeps_its_biases_and_outputs():
    """Before: its layers were not known as BEiT's, and the biases of queries and values were dropped."""
    beit = randomise(BEiTPretrainViT(ARCH, 24, 4, layer_scale_init_value=0.0, **PLAIN))
    vit = MaPeTViT(ARCH, 24, 4, out_type="raw").eval()
    missing, unexpected = vit.load_state_dict(beit.state_dict(), strict=False)
    assert (missing, unexpected) == ([], [])
    images = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        torch.testing.assert_close(vit(images)[0], beit(images, mask=None)[0], rtol=1e-6, atol=1e-6)


def test_prefix_and_other_parameters_are_respected():
    scales = {"backbone.layers.0.gamma_1": torch.ones(2), "backbone.layers.0.gamma_2": torch.zeros(2)}
    state_dict = {**scales, "teacher.layers.0.gamma_1": torch.ones(2), "backbone.ln1.weight": torch.ones(2)}
    assert beit_to_vit(state_dict, "backbone.") == 1
    assert sorted(state_dict) == [
        "backbone.layers.0.attn.gamma1.weight",
        "backbone.layers.0.ffn.gamma2.weight",
        "backbone.ln1.weight",
        "teacher.layers.0.gamma_1",
    ]


def test_plain_weights_are_left_as_they_are():
    weights = MaPeTViT(ARCH, 24, 4).state_dict()
    before = list(weights)
    assert beit_to_vit(weights) == 0
    assert list(weights) == before


@pytest.mark.parametrize("positions", ["use_rel_pos_bias", "use_shared_rel_pos_bias"])
def test_relative_positions_are_refused(positions):
    """A plain ViT cannot express them, so the features would be others without a word."""
    beit = BEiTPretrainViT(ARCH, 24, 4, **{**PLAIN, positions: True})
    with pytest.raises(ValueError, match="relative position biases"):
        MaPeTViT(ARCH, 24, 4).load_state_dict(beit.state_dict(), strict=False)
