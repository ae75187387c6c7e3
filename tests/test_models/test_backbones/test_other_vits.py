"""The method for timm's ViTs: exactly the method, on exactly the library's network."""

import pytest
import timm
import torch
from mmpretrain.registry import MODELS as MMPRETRAIN_MODELS
from naive_two_stream import Library, gelu_mlp, swiglu_mlp, two_stream_forward
from torch import nn

from mapet_mm.models import MaPeTPretrainViT
from mapet_mm.models.backbones.two_stream_vit import TwoStreamViT
from mapet_mm.registry import MODELS

TOLERANCE = 1e-5  # relative, float32
GRID = (3, 5)
SIZE = dict(img_size=(12, 20), patch_size=4)
ARCH = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=32)
TIMM = dict(type="mapet_mm.MaPeTPretrainTIMM", embed_dim=24, depth=2, num_heads=3, **SIZE)

VIT = dict(type="mapet_mm.MaPeTPretrainViT", arch=ARCH, layer_scale_init_value=0.0, **SIZE)
REGISTERS = dict(TIMM, model_name="vit_tiny_patch16_224", reg_tokens=2, init_values=0.1)
TIMM_EVA02 = dict(TIMM, model_name="eva02_tiny_patch14_224")
VITS = {
    "vit": VIT,
    "timm, registers": REGISTERS,
    "timm eva02": TIMM_EVA02,
}
# More of what their layers may have; the library's own pass is what these are checked against.
VARIANTS = {
    **VITS,
    "timm, norms": dict(REGISTERS, qk_norm=True, scale_attn_norm=True, scale_mlp_norm=True, pre_norm=True),
    "timm, registers without position": dict(REGISTERS, no_embed_class=True, dynamic_img_size=True),
    "timm dinov3": dict(TIMM, model_name="vit_small_patch16_dinov3"),
    "timm eva02, apart": dict(TIMM_EVA02, qkv_fused=False, scale_attn_inner=True),
}


def build(config, objective="mapet", cutting_point=6, **options):
    """A ViT with random weights, none of them small."""
    vit = MODELS.build(dict(config, objective=objective, cutting_point=cutting_point, **options))
    for parameter in vit.parameters():
        nn.init.normal_(parameter, std=0.3)
    vit.eval()
    return vit


@pytest.fixture(params=VITS)
def config(request):
    return VITS[request.param]


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours - reference).norm() / reference.norm()).item()


def library_of(vit) -> Library:
    """What the naive reference has to know of a ViT."""
    if isinstance(vit, MaPeTPretrainViT):
        return Library()
    extra = ["cls_token"] if vit.timm_model.reg_token is None else ["cls_token", "reg_token"]
    is_eva = isinstance(vit.timm_model, timm.models.Eva)
    swiglu = swiglu_mlp(".mlp.fc1", ".mlp.norm", ".mlp.fc2")
    return Library(
        patches="timm_model.patch_embed.proj",
        extra=tuple(f"timm_model.{name}" for name in extra),
        positions="timm_model.pos_embed",
        layer="timm_model.blocks.{}",
        norms=("norm1", "norm2"),
        scales=("ls1.gamma", "ls2.gamma"),
        mlp=swiglu if is_eva else gelu_mlp(".mlp.fc1", ".mlp.fc2"),
        out="timm_model.fc_norm" if isinstance(vit.timm_model.norm, nn.Identity) else "timm_model.norm",
        angles=with_class_token(vit.timm_model.rope.get_embed()) if is_eva else None,
    )


def with_class_token(angles: torch.Tensor) -> torch.Tensor:
    """Sines and cosines (N, 2 d) with those of the class token, which is not turned."""
    half = angles.shape[1] // 2
    return torch.cat([torch.cat([torch.zeros(1, half), torch.ones(1, half)], 1), angles])


def compare(vit, drop_rates=(0.0, 0.0), with_context=False):
    """Latents in raster order, ours and the naive reference's."""
    images = torch.randn(3, 3, 12, 20)
    permutation = vit.sample_permutation(3, "cpu")
    torch.manual_seed(7)
    latents, _ = vit(images, permutation, with_context=with_context)
    torch.manual_seed(7)
    reference, is_target = two_stream_forward(
        dict(vit.named_parameters()),
        images,
        permutation,
        cutting_point=vit.cutting_point,
        objective=vit.objective.name,
        patch_size=4,
        num_heads=3,
        drop_rates=drop_rates,
        library=library_of(vit),
        with_context=with_context,
    )
    assert is_target.sum(1).eq(vit.num_targets).all()
    first_rank = vit.num_extra_tokens if with_context else vit.cutting_point
    raster = permutation[:, first_rank:].argsort(1)[..., None].expand_as(latents)
    return latents.gather(1, raster), reference


@pytest.mark.parametrize("with_context", [False, True], ids=["targets", "all patches"])
@pytest.mark.parametrize("objective", ["mapet", "pim", "mim"])
def test_equals_the_naive_reference(config, objective, with_context):
    """Latents and gradients equal those of per-image masks and angles in raster order."""
    vit = build(config, objective)
    ours, reference = compare(vit, with_context=with_context)
    assert relative_error(ours, reference) < TOLERANCE
    direction = torch.randn_like(ours)
    parameters = dict(vit.named_parameters())
    gradients = torch.autograd.grad((ours * direction).sum(), parameters.values(), retain_graph=True)
    expected = torch.autograd.grad((reference * direction).sum(), parameters.values())
    scale = max(g.norm() for g in expected)  # some gradients (key biases) are zero but for rounding
    for name, gradient, other in zip(parameters, gradients, expected, strict=True):
        assert (gradient - other).norm() < TOLERANCE * max(other.norm(), 1e-2 * scale), name


@pytest.mark.parametrize("name", VARIANTS)
def test_the_context_alone_is_pims_context(name):
    """In PIM the context sees nothing but itself, as in an encoder of the visible patches."""
    vit = build(VARIANTS[name], "pim")
    encoder = build(VARIANTS[name], "context")
    encoder.load_state_dict(vit.state_dict())
    images = torch.randn(2, 3, 12, 20)
    permutation = vit.sample_permutation(2, "cpu")
    of_all_patches, _ = vit(images, permutation, with_context=True)
    alone, _ = encoder(images, permutation)
    num_patches = vit.cutting_point - vit.num_extra_tokens
    assert alone.shape[1] == vit.cutting_point
    assert relative_error(alone[:, vit.num_extra_tokens :], of_all_patches[:, :num_patches]) < TOLERANCE


@pytest.mark.parametrize("name", VARIANTS)
def test_on_its_own_content_it_is_the_librarys_network(name):
    """MIM's rows see each other in full: with patches in place of mask tokens, nothing else differs."""
    vit = build(VARIANTS[name], "mim")
    images = torch.randn(2, 3, 12, 20)
    permutation = vit.sample_permutation(2, "cpu")
    tokens, positions = vit.embed_patches(images)
    tokens = tokens if positions is None else tokens + positions
    tokens = vit.before_layers(tokens.gather(1, permutation[..., None].expand_as(tokens)))
    where = vit.attention_positions(permutation, vit.layout)
    for layer in vit.layers:
        tokens = layer.two_streams(tokens, vit.layout, 0, where)
    whole = TwoStreamViT.encode(vit, images)[-1]  # registers included
    expected = whole.gather(1, permutation[..., None].expand_as(whole))
    assert relative_error(vit.after_layers(tokens), expected) < TOLERANCE


def test_a_target_never_sees_its_own_content_nor_what_comes_behind(config):
    """By gradient: prediction t depends on the content of context and of targets before t only."""
    vit = build(config)
    images = torch.randn(1, 3, 12, 20, requires_grad=True)
    latents, permutation = vit(images)
    patches = (permutation[0, vit.num_extra_tokens :] - vit.num_extra_tokens).tolist()
    num_context = vit.cutting_point - vit.num_extra_tokens
    for t in range(vit.num_targets):
        (gradient,) = torch.autograd.grad(latents[0, t].sum(), images, retain_graph=True)
        by_patch = gradient[0].unfold(1, 4, 4).unfold(2, 4, 4).abs().sum((0, 3, 4)).flatten()
        seen = patches[: num_context + t]
        assert (by_patch[seen] > 0).all()
        assert (by_patch[[patch for patch in patches if patch not in seen]] == 0).all()


def test_weights_go_to_the_librarys_class_and_back(config):
    """Under the library's own names; only the mask token is ours."""
    vit = build(config)
    own = vit.state_dict()
    options = {k: v for k, v in config.items() if k != "type"}
    kind = next(base for base in type(vit).__mro__ if base.__module__.startswith("mmpretrain."))
    settled = {} if "model_name" in config else dict(out_type="raw", final_norm=True)
    theirs = MMPRETRAIN_MODELS.build(dict(type=kind.__name__, **options, **settled))
    del own["mask_token"]
    theirs.load_state_dict(own)
    theirs.eval()
    images = torch.randn(2, 3, 12, 20)
    assert torch.equal(theirs(images)[-1], TwoStreamViT.encode(vit, images)[-1])
    # Ours asks for the grid of what MMPretrain has saved.
    fresh = build(dict(config, pretrained_grid=GRID) if config is VIT else config)
    assert fresh.load_state_dict(theirs.state_dict(), strict=False).missing_keys == []


@pytest.mark.parametrize("name", ["timm, registers", "timm eva02"])
def test_stochastic_depth_drops_a_branch_of_all_streams(name):
    """Of an image either all rows of the layout are as before or all are changed."""
    vit = build(VITS[name], drop_path_rate=0.7)
    vit.train()
    images = torch.randn(24, 3, 12, 20)
    permutation = vit.sample_permutation(24, "cpu")
    tokens = vit.embed(images, permutation)
    where = vit.attention_positions(permutation, vit.layout)
    changed = (vit.layers[1].two_streams(tokens, vit.layout, 0, where) != tokens).any(-1)
    assert torch.equal(changed.all(1), changed.any(1))
    assert 0 < changed.all(1).sum() < 24


def test_mapet_trains_it_on_the_targets_tokens(config):
    """Each target's token is its patch's, behind as many extra tokens as the ViT has."""
    model = MODELS.build(
        dict(
            type="mapet_mm.MaPeT",
            backbone=dict(config, cutting_point=6),
            head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=24, vocab_size=16),
            target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=16),
        )
    )
    model.init_weights()
    model.train()
    grids = torch.stack([torch.randperm(15) for _ in range(2)]).reshape(2, *GRID)
    images = torch.randn(2, 3, 12, 20)
    loss = model.loss([images, grids])["loss"]
    loss.backward()
    assert 0 < loss.item() < 10
    permutation = model.backbone.sample_permutation(2, "cpu")
    patches = permutation[:, 6:] - model.backbone.num_extra_tokens
    assert torch.equal(model.target_tokens(grids, permutation), grids.flatten(1).gather(1, patches))
    assert model.extract_feat(images)[-1].shape == (2, 16, 24)
    model.eval()
    assert 0 <= model.predict([images, grids])[0].token_accuracy <= 100


@pytest.mark.parametrize("kind", ["mmpretrain.BEiTViT", "mapet_mm.MaPeTViT", "mmpretrain.ResNet"])
def test_a_backbone_without_two_streams_is_refused_by_name(kind):
    backbone = dict(type=kind, depth=18) if kind.endswith("ResNet") else dict(type=kind, arch=ARCH)
    head = dict(type="mapet_mm.TokenPredictionHead", embed_dims=24, vocab_size=16)
    with pytest.raises(ValueError, match=rf"{kind.split('.')[1]} has no"):
        MODELS.build(dict(type="mapet_mm.MaPeT", backbone=backbone, head=head, target_generator=None))


REFUSED = [
    (dict(REGISTERS, class_token=False, global_pool=""), "class_token"),
    (dict(REGISTERS, patch_drop_rate=0.5), "patch_drop_rate"),
    (dict(REGISTERS, pos_embed="none"), "pos_embed"),
    (dict(REGISTERS, cutting_point=2), "cutting_point"),
    (dict(TIMM, model_name="vit_small_patch16_18x2_224"), "ParallelThingsBlock"),
    (dict(TIMM_EVA02, attn_type="rope"), "AttentionRope"),
    (dict(type="mapet_mm.MaPeTPretrainTIMM", model_name="resnet10t"), "ResNet"),
]


@pytest.mark.parametrize(("config", "noun"), REFUSED, ids=str)
def test_what_it_would_do_wrong_is_refused(config, noun):
    with pytest.raises(ValueError, match=noun):
        MODELS.build({"cutting_point": 6, **config})
