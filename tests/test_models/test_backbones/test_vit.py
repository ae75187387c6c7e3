"""Backbones: initialisation, permutations, information flow, outputs."""

import pytest
import torch
from mmpretrain.models.backbones import VisionTransformer
from small_vit import GEOMETRY, pretrain_vit, randomise

from mapet_mm.models import MaPeTPretrainViT, MaPeTViT, TokenPredictionHead

LINEAR_WEIGHTS = ("attn.qkv.weight", "attn.proj.weight", "ffn.layers.0.0.weight", "ffn.layers.1.weight")


def assert_std(tensor: torch.Tensor, std: float) -> None:
    """The sample's standard deviation within 5 standard errors of a truncated normal's."""
    assert abs(tensor.mean().item()) < 5 * std / tensor.numel() ** 0.5
    assert tensor.abs().max() <= 10 * std  # the inverse error function's infinities do not become weights
    assert tensor.std().item() == pytest.approx(std, rel=5 / (2 * tensor.numel()) ** 0.5 + 1e-3)


@pytest.mark.parametrize(("arch", "dim"), [("deit-tiny", 192), ("deit-small", 384)])
def test_initial_statistics_of_every_parameter(arch, dim):
    vit = MaPeTPretrainViT(arch, cutting_point=50)
    vit.init_weights()
    seen = set()
    for name, parameter in vit.named_parameters():
        kind = name.split(".", 2)[-1] if name.startswith("layers") else name
        seen.add(kind)
        if kind in ("mask_token", "pos_embed", *LINEAR_WEIGHTS):
            assert_std(parameter, 0.02)
        elif kind == "cls_token":
            assert_std(parameter, 1e-6)
        elif kind.endswith(("gamma1.weight", "gamma2.weight")):
            assert parameter.eq(0.1).all()
        elif kind in ("ln1.weight", "ln2.weight"):
            assert parameter.eq(1).all()
        elif kind.startswith("patch_embed"):
            bound = (3 * 16 * 16) ** -0.5  # Conv2d: uniform within 1 / sqrt(fan in)
            assert 0.9 * bound < parameter.abs().max() <= bound
        else:
            assert kind.endswith("bias"), name
            assert parameter.eq(0).all(), name
    assert len(seen) == 19
    assert vit.ln1.eps == vit.layers[0].ln1.eps == 1e-6
    assert vit.layers[0].ffn.layers[0][1].approximate == "none"
    assert vit.embed_dims == dim


def test_permutation_keeps_the_class_token_first_and_is_uniform():
    vit = pretrain_vit()
    permutation = vit.sample_permutation(4000, "cpu", torch.Generator().manual_seed(3))
    assert permutation.dtype == torch.int64
    assert permutation[:, 0].eq(0).all()
    assert torch.equal(permutation.sort(1).values, torch.arange(26).expand(4000, -1))
    counts = torch.stack([permutation[:, t].bincount(minlength=26)[1:] for t in range(1, 26)]).float()
    chi_square = ((counts - 160) ** 2 / 160).sum()  # 24 * 24 degrees of freedom: 576 +- 34
    assert 576 - 5 * 34 < chi_square < 576 + 5 * 34
    again = vit.sample_permutation(4000, "cpu", torch.Generator().manual_seed(3))
    assert torch.equal(permutation, again)


@pytest.mark.parametrize("objective", ["mapet", "pim", "mim"])
@pytest.mark.parametrize("cutting_point", [1, 8, 25])
def test_every_parameter_gets_a_gradient(objective, cutting_point):
    """So `find_unused_parameters` stays off. Checked on freshly initialised weights, as training starts."""
    vit = MaPeTPretrainViT(cutting_point=cutting_point, objective=objective, **GEOMETRY)
    vit.init_weights()
    head = TokenPredictionHead(24, 11)
    latents, _ = vit(torch.randn(4, 3, 20, 20))
    head.loss(latents, torch.randint(11, latents.shape[:2]))["loss"].backward()
    for name, parameter in [*vit.named_parameters(), *head.named_parameters()]:
        assert parameter.grad is not None, name
        # MIM with nothing but the class token visible looks at no patch.
        blind = objective == "mim" and cutting_point == 1 and name.startswith("patch_embed")
        assert (parameter.grad.abs().max() > 0) != blind, name


REFUSED = [
    (dict(objective="beit"), "objective"),
    *[(dict(cutting_point=number), "cutting_point=.* is outside 1..25$") for number in (-1, 0, 26, 27)],
]


@pytest.mark.parametrize(("options", "noun"), REFUSED, ids=str)
def test_options_that_cannot_be_are_refused(options, noun, unchecked_types):
    with pytest.raises(ValueError, match=noun):
        pretrain_vit(**options)


def test_other_image_sizes_and_permutations_are_refused():
    vit = pretrain_vit()
    with pytest.raises(ValueError, match=r"images of \(24, 20\)"):
        vit(torch.randn(1, 3, 24, 20))
    for number in (25, 27):
        with pytest.raises(ValueError, match=rf"has shape \(1, {number}\)"):
            vit(torch.randn(1, 3, 20, 20), torch.arange(number)[None])


def test_the_context_alone_has_no_other_context():
    vit = pretrain_vit(objective="context")
    with pytest.raises(ValueError, match="with_context=True"):
        vit(torch.randn(1, 3, 20, 20), with_context=True)


@pytest.mark.parametrize("wrong", [{9: 4}, {25: 26}, {3: -1}, {0: 1, 1: 0}], ids=str)
def test_a_permutation_that_is_no_order_of_the_tokens_is_refused(wrong):
    """A patch that comes twice would be context and target at once, or predicted twice."""
    vit = pretrain_vit()
    permutation = torch.arange(26).repeat(2, 1)
    vit(torch.randn(2, 3, 20, 20), permutation)
    for place, token in wrong.items():
        permutation[1, place] = token
    with pytest.raises(ValueError, match=r"permutation\[1\]"):
        vit(torch.randn(2, 3, 20, 20), permutation)


def test_defaults_are_those_of_the_papers_largest_model():
    vit = MaPeTPretrainViT()
    assert (vit.embed_dims, vit.num_layers, vit.img_size[0], vit.patch_resolution) == (768, 12, 224, (14, 14))
    assert (vit.cutting_point, vit.objective.name, vit.out_type) == (60, "mapet", "raw")
    assert vit.layers[0].attn.gamma1.weight.eq(0.1).all()
    assert not any(layer.with_cp for layer in vit.layers)
    plain = MaPeTViT("deit-tiny")
    assert (plain.img_size, plain.patch_resolution, plain.out_type) == ((224, 224), (14, 14), "cls_token")
    assert list(plain.out_indices) == [11]
    assert plain.layers[0].attn.gamma1.weight.eq(0.1).all()
    assert not any(layer.with_cp for layer in plain.layers)


@pytest.mark.parametrize("build", [MaPeTViT, MaPeTPretrainViT])
@pytest.mark.parametrize("with_cp", [False, True])
def test_activation_checkpointing_runs_each_layer_again(build, with_cp):
    options = dict(out_type="raw")
    if build is MaPeTPretrainViT:
        options = dict(cutting_point=8)
    torch.manual_seed(1)
    plain = build(drop_path_rate=0.5, **GEOMETRY, **options)
    vit = build(drop_path_rate=0.5, with_cp=with_cp, **GEOMETRY, **options)
    plain.init_weights()
    vit.load_state_dict(plain.state_dict())
    runs = []
    for layer in vit.layers:
        layer.ln1.register_forward_hook(lambda *_: runs.append(1))
    images, results = torch.randn(2, 3, 20, 20), []
    for model in (plain, vit):
        torch.manual_seed(2)
        output = model(images)[0]
        output.square().sum().backward()
        results.append([output.detach(), *(parameter.grad for parameter in model.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert len(runs) == 3 * (1 + with_cp)
    with torch.no_grad():
        vit(images)
    assert len(runs) == 3 * (2 + with_cp)


def test_mapet_vit_is_mmpretrains_vision_transformer():
    ours = randomise(MaPeTViT(out_type="avg_featmap", **GEOMETRY))
    theirs = VisionTransformer(layer_scale_init_value=0.1, out_type="avg_featmap", **GEOMETRY)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    images = torch.randn(2, 3, 20, 20)
    assert torch.equal(ours(images)[0], theirs(images)[0])
    ours.load_state_dict(theirs.state_dict(), strict=True)


def test_pairs_are_each_layers_map_and_class_token():
    """As MMSegmentation's DPT head takes them."""
    vit = MaPeTViT(out_type="featmap_and_cls_token", out_indices=(0, 2), final_norm=False, **GEOMETRY).eval()
    images = torch.randn(2, 3, 20, 20)
    pairs = vit(images)
    vit.out_type = "raw"
    for (features, class_token), tokens in zip(pairs, vit(images), strict=True):
        assert torch.equal(class_token, tokens[:, 0])
        assert torch.equal(features.flatten(2).mT, tokens[:, 1:])
        assert features.shape == (2, 24, 5, 5)


def test_feature_maps_are_contiguous():
    """MMPretrain's are permuted views, of which decoders cannot take views of their own (DMNet)."""
    vit, theirs = (build(out_type="featmap", **GEOMETRY) for build in (MaPeTViT, VisionTransformer))
    images = torch.randn(2, 3, 20, 20)
    assert not theirs(images)[0].is_contiguous()
    for feature_map in (vit(images)[0], MaPeTViT(out_type="featmap_and_cls_token", **GEOMETRY)(images)[0][0]):
        assert feature_map.view(2, 24, 25).shape == (2, 24, 25)


@pytest.mark.parametrize(("frozen_stages", "training"), [(0, [True] * 4), (2, [False, False, True, True])])
def test_frozen_stages_stay_in_evaluation_mode(frozen_stages, training):
    """Calling train() on the model does not thaw them: no stochastic depth in a frozen layer."""
    vit = MaPeTViT(frozen_stages=frozen_stages, **GEOMETRY)
    assert vit.train() is vit
    assert [layer.attn.out_drop.training for layer in vit.layers] + [vit.training] == training
    assert vit.pos_embed.requires_grad == vit.patch_embed.training == (frozen_stages == 0)
