"""Position embeddings go from the grid they were trained on to the backbone's own, or not at all."""

import pytest
import torch
from mmengine.runner.checkpoint import load_checkpoint, save_checkpoint
from mmpretrain.models.backbones import VisionTransformer
from torch.nn import functional as F

from mapet_mm.models import MaPeTPretrainViT, MaPeTViT, TokenViT
from mapet_mm.models.backbones.checkpoint_hooks import source_grid

ARCH = dict(embed_dims=24, num_layers=1, num_heads=3, feedforward_channels=48)


def build(img_size, with_cls_token=True, **options):
    vit = MaPeTViT(ARCH, img_size, 16, out_type="raw", with_cls_token=with_cls_token, **options)
    torch.nn.init.normal_(vit.pos_embed)
    return vit.eval()


def resized(vit, grid):
    """Positions of the patches on another grid, (n, D): PyTorch's interpolation of the true one."""
    maps = vit.pos_embed[:, vit.num_extra_tokens :].unflatten(1, vit.patch_resolution).permute(0, 3, 1, 2)
    maps = F.interpolate(maps, size=grid, mode="bicubic", align_corners=False)
    return maps[0].flatten(1).T


def assert_resized(target, source):
    ours = target.pos_embed.detach()
    torch.testing.assert_close(ours[0, target.num_extra_tokens :], resized(source, target.patch_resolution))
    if target.num_extra_tokens and source.num_extra_tokens:
        assert torch.equal(ours[:, 0], source.pos_embed[:, 0])


# (height, width) in pixels, from -> to, patches of 16.
SIZES = [
    ((32, 64), (64, 128)),
    ((32, 64), (64, 32)),
    ((32, 64), (32, 64)),
    ((64, 64), (32, 128)),  # as many patches
    ((32, 128), (64, 64)),
    ((224, 224), (256, 192)),
    ((256, 192), (224, 224)),
    ((512, 512), (512, 1024)),
    ((512, 512), (640, 640)),
]


@pytest.mark.parametrize("target_has_class", [True, False])
@pytest.mark.parametrize("source_has_class", [True, False])
@pytest.mark.parametrize(("source", "target"), SIZES)
def test_a_state_dict_says_which_grid_its_positions_cover(source, target, source_has_class, target_has_class):
    source, target = build(source, source_has_class), build(target, target_has_class)
    own_class = target.pos_embed[:, 0].clone()
    target.load_state_dict(source.state_dict(), strict=False)
    assert_resized(target, source)
    if target_has_class and not source_has_class:
        assert torch.equal(target.pos_embed[:, 0], own_class)


@pytest.mark.parametrize("inside", [False, True])
def test_a_saved_checkpoint_says_it_as_well(tmp_path, inside):
    """Also of a model around the backbone, read back without running code."""
    source, target = build((32, 64)), build((64, 32))
    wrap = (lambda vit: torch.nn.ModuleDict({"backbone": vit})) if inside else (lambda vit: vit)
    save_checkpoint({"state_dict": wrap(source).state_dict()}, str(tmp_path / "weights.pth"))
    assert torch.load(tmp_path / "weights.pth", weights_only=True)
    load_checkpoint(wrap(target), str(tmp_path / "weights.pth"))
    assert_resized(target, source)


def test_pretraining_weights_say_it_as_well():
    source = MaPeTPretrainViT(ARCH, (32, 64), 16, 3)
    torch.nn.init.normal_(source.pos_embed)
    target = build((64, 32))
    target.load_state_dict(source.state_dict())
    assert_resized(target, source)


@pytest.mark.parametrize(
    ("source", "target"),
    [((32, 64), (64, 128)), ((32, 64), (64, 32)), ((32, 64), (32, 64)), ((64, 64), (32, 128))],
)
def test_an_unknown_grid_is_refused_until_it_is_told(source, target):
    """A prefix cut off, as `init_cfg` does it, leaves names and values only."""
    weights = build(source).state_dict()
    source, message = build(source), rf"cover {source[0] * source[1] // 256} patches.*`pretrained_grid`"
    weights = dict(source.state_dict())
    with pytest.raises(ValueError, match=message):
        build(target).load_state_dict(weights)
    for told in (source.patch_resolution, list(source.patch_resolution)):
        vit = build(target, pretrained_grid=told)
        vit.load_state_dict(weights)
        assert_resized(vit, source)


@pytest.mark.parametrize(
    ("source", "target"), [((64, 64), (64, 64)), ((64, 64), (128, 96)), ((64, 64), (96, 96))]
)
@pytest.mark.parametrize("with_cls_token", [True, False])
def test_a_square_is_taken_for_granted(source, target, with_cls_token):
    source, target = build(source), build(target, with_cls_token)
    target.load_state_dict(dict(source.state_dict()), strict=False)
    assert_resized(target, source)


def test_what_the_checkpoint_says_counts_before_what_it_is_told():
    """A resumed run still has the option that its first weights needed; its own need none."""
    vit = build((64, 32), pretrained_grid=(2, 4))
    other = build((64, 32))
    vit.load_state_dict(other.state_dict())
    assert torch.equal(vit.pos_embed, other.pos_embed)
    vit = build((64, 48), pretrained_grid=(2, 4))  # and if it does not say it, their number does
    other = build((64, 48))
    vit.load_state_dict(dict(other.state_dict()))
    assert torch.equal(vit.pos_embed, other.pos_embed)


def test_what_the_checkpoint_says_of_other_positions_does_not_count():
    """Somebody has resized the values and left the metadata."""
    state, other = build((32, 64)).state_dict(), build((64, 64))
    state["pos_embed"] = other.pos_embed.detach()
    vit = build((64, 64))
    vit.load_state_dict(state)
    assert torch.equal(vit.pos_embed, other.pos_embed)


def test_an_oblong_backbone_still_loads_into_mmpretrains_class():
    ours, theirs = build((32, 64)), VisionTransformer(ARCH, (32, 64), 16, layer_scale_init_value=0.1)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(theirs.pos_embed, ours.pos_embed)


def test_weights_without_positions_load():
    vit, weights = build((32, 64)), dict(build((32, 64)).state_dict())
    before = vit.pos_embed.clone()
    del weights["pos_embed"]
    vit.load_state_dict(weights, strict=False)
    assert torch.equal(vit.pos_embed, before)


@pytest.mark.parametrize("prefix", ["backbone", "backbone."])
@pytest.mark.parametrize(
    ("source", "target"), [((32, 128), (64, 64)), ((32, 64), (64, 32)), ((32, 64), (64, 128))]
)
def test_init_cfg_with_a_prefix_keeps_the_grid(source, target, prefix, tmp_path, capture_log):
    """MMEngine cuts the metadata off with the prefix. Of weights loaded later nothing is known again."""
    source, path = build(source), str(tmp_path / "weights.pth")
    save_checkpoint({"state_dict": torch.nn.ModuleDict({"backbone": source}).state_dict()}, path)
    vit = build(target, init_cfg=dict(type="Pretrained", checkpoint=path, prefix=prefix))
    vit.init_weights()
    assert_resized(vit, source)
    assert "Assumed" not in capture_log()
    assert source_grid(8, (4, 4), vit._grid_of_init, (2, 4)) == (2, 4)


@pytest.mark.parametrize(
    ("source", "target", "warned"),
    [(64, 64, False), (64, 128, False), (64, (128, 96), True), ((64, 128), (64, 128), False)],
)
def test_an_assumed_square_is_warned_of_where_the_backbones_grid_is_none(source, target, warned, capture_log):
    source = build(source)
    grid = source.patch_resolution if source.patch_resolution == (4, 8) else None
    build(target, pretrained_grid=grid).load_state_dict(dict(source.state_dict()))
    message = "Assumed a square grid of 4 x 4 patches for the checkpoint's position embeddings"
    assert (message in capture_log()) == warned
    assert ("(here: (8, 6))" in capture_log()) == warned


def test_token_classifiers_take_positions_as_well():
    source, target = (TokenViT(vocab_size=5, grid=grid, arch=ARCH) for grid in ((2, 4), [4, 2]))
    torch.nn.init.normal_(source.pos_embed)
    target.load_state_dict(source.state_dict())
    assert_resized(target, source)


@pytest.mark.parametrize("with_cls_token", [True, False])
@pytest.mark.parametrize("size", [(512, 1024), (640, 640), (256, 192)])
def test_images_of_another_size_get_resized_positions(size, with_cls_token):
    """A backbone of 512 x 512 sees them as one that was built for them, with resized positions, does."""
    source = build((512, 512), with_cls_token)
    other = build(size, with_cls_token)
    other.load_state_dict(source.state_dict())
    assert_resized(other, source)
    images = torch.randn(1, 3, *size)
    with torch.no_grad():
        torch.testing.assert_close(source(images)[0], other(images)[0])
