"""`TIMMViT`: weights by every road, timm's own features at any size, refusals, rates by depth."""

from pathlib import Path

import pytest
import timm
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from starts import OF_TIMM, SIDE, randomise, save_run
from torch import nn

from mapet_mm.models import MaPeTPretrainTIMM, MaPeTViT, TIMMViT
from mapet_mm.registry import MODELS
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.run_folder import Run
from mapet_mm.weight_files import write_weights

KINDS = ("dinov2 with registers", "dinov3", "eva02, swiglu", "clip")
WIDTH = 24


@pytest.fixture(scope="module", params=KINDS)
def run(request, tmp_path_factory) -> tuple[Path, MaPeTPretrainTIMM, str, dict]:
    """A RUN that continued a small ViT of timm: its folder, the training's backbone, its name and sizes."""
    name, sizes, _ = OF_TIMM[request.param]
    folder = tmp_path_factory.mktemp("run")
    return folder, save_run(request.param, folder), name, sizes


def roads(run: tuple) -> dict[str, dict]:
    """The arguments by which a user names a RUN, or its files, with the network where they do not have it."""
    folder, _, name, sizes = run
    named = dict(model_name=name, **sizes)
    epoch = dict(type="Pretrained", checkpoint=str(folder / "training/epoch_10.pth"))
    return {
        "epoch": dict(named, init_cfg=dict(epoch, prefix="backbone.")),
        "epoch, prefix of timm": dict(named, init_cfg=dict(epoch, prefix="backbone.timm_model.")),
        "as for TIMMBackbone": dict(named, features_only=True, init_cfg=dict(epoch, prefix="backbone.")),
        "checkpoint_path": dict(named, checkpoint_path=str(folder / "timm/model.safetensors")),
        "checkpoint_path, epoch": dict(named, checkpoint_path=epoch["checkpoint"]),
        "RUN": dict(model_name=str(folder)),
        "model_name, epoch": dict(model_name=epoch["checkpoint"]),
        "RUN/timm": dict(model_name=str(folder / "timm")),
        "local-dir": dict(model_name=f"local-dir:{folder}/timm", pretrained=True),
    }


def test_each_road_brings_all_weights_and_their_features(run):
    """By value: none of the weights is a constant."""
    _, trained, _, _ = run
    images = torch.randn(2, 3, SIDE, SIDE)
    with torch.no_grad():
        expected = trained.encode(images)[0][:, -16:]  # the patches
    for road, arguments in roads(run).items():
        vit = TIMMViT(**arguments)
        vit.init_weights()
        weights = vit.state_dict()
        assert weights.keys() == trained.state_dict().keys() - {"mask_token"}, road
        assert all(value.equal(trained.state_dict()[key]) for key, value in weights.items()), road
        vit.eval()
        if road in ("RUN", "model_name, epoch"):  # the checkpoint says what the norms add
            with torch.no_grad():
                (feature_map,) = vit(images)
            torch.testing.assert_close(feature_map.flatten(2).mT, expected)


@torch.no_grad()
def test_maps_are_timms_own_where_the_image_has_whole_patches(run):
    folder, _, _, _ = run
    network = timm.create_model(f"local-dir:{folder}/timm", pretrained=True, dynamic_img_size=True).eval()
    vit = TIMMViT(str(folder / "timm"), out_indices=[0, -1], final_norm=False).eval()
    for size in ((SIDE, SIDE), (48, 64)):
        images = torch.randn(2, 3, *size)
        expected = network.forward_intermediates(images, [0, 1], intermediates_only=True)
        for ours, theirs in zip(vit(images), expected, strict=True):
            assert torch.equal(ours, theirs)


@torch.no_grad()
def test_an_image_of_any_size_has_maps_without_what_the_padding_answered(run):
    """Bands that are read from a map at the image's own size lie where they are."""
    folder, _, _, _ = run
    vit = TIMMViT(str(folder), out_type="featmap_and_cls_token", out_indices=[0, 1]).eval()
    for feature_map, token in vit(torch.randn(1, 3, 77, 101)):
        assert feature_map.shape == (1, WIDTH, 10, 13)
        assert token.shape == (1, WIDTH)
        assert feature_map.isfinite().all()


@pytest.mark.parametrize("build", ["TIMMViT", "MaPeTViT"])
@torch.no_grad()
def test_a_map_lies_over_its_image_and_not_over_the_padding(build):
    """A ViT that copies each patch's brightness; a ramp over 341 columns comes out as the same ramp."""
    if build == "TIMMViT":
        vit = TIMMViT("vit_tiny_patch16_224", embed_dim=24, depth=1, num_heads=3, final_norm=False)
        network, projection = vit.timm_model, vit.timm_model.patch_embed.proj
    else:
        arch = dict(embed_dims=24, num_layers=1, num_heads=3, feedforward_channels=24)
        vit = MaPeTViT(arch, out_type="featmap", final_norm=False)
        network, projection = vit, vit.patch_embed.projection
    for parameter in vit.parameters():
        parameter.zero_()
    projection.weight.fill_(1 / projection.weight[0].numel())
    assert network.pos_embed.eq(0).all()
    for width in (341, 352):
        ramp = torch.arange(width) + 0.5
        (feature_map,) = vit(ramp.expand(1, 3, 256, width))
        assert feature_map.shape == (1, 24, 16, 22)
        over_image = nn.functional.interpolate(feature_map, (256, width), mode="bilinear")[0, 0, 0]
        error = (over_image - ramp)[24:-32].abs().max()  # the last patch is part padding
        assert error < 0.01


def test_positions_of_another_size_are_resized_as_timm_does(run):
    folder, trained, _, _ = run
    vit = TIMMViT(str(folder), img_size=48)
    positions = vit.timm_model.pos_embed
    if positions is None:
        pytest.skip("angles are of any size")
    number = vit.num_extra_tokens if positions.shape[1] > 36 else 0
    expected = timm.layers.resample_abs_pos_embed(
        trained.timm_model.pos_embed, (6, 6), (4, 4), num_prefix_tokens=number
    )
    assert torch.equal(positions, expected)


def test_layers_learn_at_rates_by_their_depth(run):
    folder, _, _, _ = run
    model = nn.ModuleDict(dict(backbone=TIMMViT(str(folder)), head=nn.Linear(WIDTH, 2)))
    settings = dict(
        type="OptimWrapper",
        constructor="mapet_mm.LayerDecayOptimWrapperConstructor",
        paramwise_cfg=dict(layer_decay_rate=0.5),
        optimizer=dict(type="AdamW", lr=1.0, weight_decay=0.05),
    )
    groups = build_optim_wrapper(model, settings).optimizer.param_groups
    rates = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        expected = 0.125
        if name.startswith(("head", "backbone.timm_model.norm", "backbone.timm_model.fc_norm")):
            expected = 1.0
        if ".blocks." in name:
            expected = {"0": 0.25, "1": 0.5}[name.split(".")[3]]
        assert rates[id(parameter)] == (0.125 if "norm_pre" in name else expected), name


@pytest.mark.parametrize("frozen_stages", [-1, 1, 2])
def test_frozen_stages_are_neither_trained_nor_in_training_mode(run, frozen_stages):
    folder, _, _, _ = run
    vit = TIMMViT(str(folder), frozen_stages=frozen_stages, drop_path_rate=0.5).train()
    trained = {
        name.split(".")[2] for name, p in vit.named_parameters() if p.requires_grad and ".blocks." in name
    }
    assert trained == {str(layer) for layer in range(max(frozen_stages, 0), 2)}
    others = [
        p.requires_grad for name, p in vit.named_parameters() if "norm" not in name and ".blocks." not in name
    ]
    assert set(others) == {frozen_stages < 1}
    assert [layer.training for layer in vit.layers] == [layer >= frozen_stages for layer in range(2)]
    if frozen_stages == 2:
        assert not any(parameter.requires_grad for parameter in vit.parameters())


@torch.no_grad()
def test_outputs_are_what_out_type_says(run):
    folder, _, _, _ = run
    images = torch.randn(2, 3, SIDE, SIDE)
    (raw,) = TIMMViT(str(folder), out_type="raw").eval()(images)
    extra = raw.shape[1] - 16
    found = {kind: TIMMViT(str(folder), out_type=kind).eval()(images)[0] for kind in TIMMViT.OUT_TYPES}
    assert torch.equal(found["cls_token"], raw[:, 0])
    assert torch.equal(found["avg_featmap"], raw[:, extra:].mean(1))
    assert torch.equal(found["featmap"].flatten(2).mT, raw[:, extra:])
    assert torch.equal(found["featmap_and_cls_token"][0], found["featmap"])
    assert torch.equal(found["featmap_and_cls_token"][1], raw[:, 0])


SMALL = dict(embed_dim=24, depth=2, num_heads=3, patch_size=8, img_size=32)
WRONG = {
    "no prefix": (
        dict(prefix=None),
        r"none of the backbone's weights, but `backbone\..*prefix=\"backbone\.\"",
    ),
    "fewer layers": (dict(depth=1), "another network: .*blocks.1"),
    "another width": (dict(embed_dim=48), "another network: .*shape"),
    "another model": (dict(model_name="vit_small_patch14_dinov2"), "another network: .*reg_token"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_would_not_be_loaded_whole_is_refused_in_one_line(case, tmp_path):
    """MMEngine would train on from random weights, with some lines in the log."""
    change, message = WRONG[case]
    name = "vit_small_patch14_reg4_dinov2"
    vit = MaPeTPretrainTIMM(name, cutting_point=8, **SMALL)
    weights = {f"backbone.{key}": value for key, value in vit.state_dict().items()}
    write_weights(tmp_path / "epoch_1.pth", weights)
    settings = dict(model_name=name, prefix="backbone.", **SMALL) | change
    init_cfg = dict(
        type="Pretrained", checkpoint=str(tmp_path / "epoch_1.pth"), prefix=settings.pop("prefix")
    )
    with pytest.raises(UserError, match=message) as raised:
        TIMMViT(init_cfg=init_cfg, **settings).init_weights()
    assert "\n" not in str(raised.value)


def test_a_ViT_of_timm_in_mapets_own_is_sent_to_the_backbone_that_takes_it(run):
    folder, _, _, _ = run
    epoch = str(folder / "training/epoch_10.pth")
    arch = dict(embed_dims=WIDTH, num_layers=2, num_heads=3, feedforward_channels=96)
    init_cfg = dict(type="Pretrained", checkpoint=epoch, prefix="backbone.")
    with pytest.raises(UserError, match=r"type=\"mapet_mm.TIMMViT\".*RUN/timm$"):
        MaPeTViT(arch, img_size=SIDE, patch_size=8, init_cfg=init_cfg).init_weights()


def test_the_entry_that_is_printed_for_a_run_builds_its_backbone(run):
    folder, trained, _, _ = run
    (backbone,) = eval(f"dict({Run(folder).backbone})").values()
    vit = MODELS.build(backbone)
    vit.init_weights()
    assert all(value.equal(trained.state_dict()[key]) for key, value in vit.state_dict().items())


def test_the_entry_that_is_printed_for_a_run_of_mapets_own_vit_builds_it(tmp_path):
    arch = dict(embed_dims=24, num_layers=1, num_heads=3, feedforward_channels=24)
    settings = dict(type="mapet_mm.MaPeTPretrainViT", arch=arch, img_size=32, patch_size=8, cutting_point=3)
    trained = randomise(MODELS.build(settings))
    weights = {f"backbone.{key}": value for key, value in trained.state_dict().items()}
    write_weights(tmp_path / "training/epoch_2.pth", weights)
    config = dict(work_dir="training", train_cfg=dict(max_epochs=2), model=dict(backbone=settings))
    Config(config).dump(tmp_path / "pretrain.py")
    (backbone,) = eval(f"dict({Run(tmp_path).backbone})").values()
    vit = MODELS.build(backbone)
    vit.init_weights()
    assert all(value.equal(trained.state_dict()[key]) for key, value in vit.state_dict().items())
    assert vit(torch.randn(1, 3, 32, 32))[0].shape == (1, 24, 4, 4)


def test_sources_that_are_none_and_settings_that_cannot_be_are_refused(run, tmp_path):
    folder, _, _, _ = run
    write_weights(tmp_path / "own/epoch_1.pth", {"backbone.cls_token": torch.zeros(1)})
    refused = [
        (dict(model_name=str(tmp_path)), "neither a RUN"),
        (dict(model_name="RUN/timm"), "RUN/timm: no model of timm, no folder and no file"),
        (dict(model_name=str(tmp_path / "own/epoch_1.pth")), r"mapet_mm.MaPeTViT.*prefix="),
        (
            dict(model_name=str(folder), init_cfg=dict(type="Pretrained", checkpoint="")),
            "leave `init_cfg` out",
        ),
        (dict(model_name="vit_tiny_patch16_224", out_type="map"), "there are featmap"),
        (dict(model_name="vit_tiny_patch16_224", out_indices=[12]), "has 12 layers"),
        (dict(model_name="resnet18"), "it is none of timm's VisionTransformer and Eva"),
        (
            dict(model_name="vit_tiny_patch16_224", out_type="cls_token", class_token=False, global_pool=""),
            "no class",
        ),
    ]
    for arguments, message in refused:
        with pytest.raises(UserError, match=message):
            MODELS.build(dict(type="mapet_mm.TIMMViT", **arguments))
