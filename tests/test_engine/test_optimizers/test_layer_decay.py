"""Learning rates and weight decays of LayerDecayOptimWrapperConstructor, by value."""

import copy
from collections.abc import Callable

import pytest
import torch
from mmengine.model import ExponentialMovingAverage, MMDistributedDataParallel
from mmengine.registry import MODELS, OPTIM_WRAPPER_CONSTRUCTORS
from mmpretrain.models import ImageClassifier, VisionTransformer
from mmseg.models import EncoderDecoder, SegTTAModel
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import mapet_mm.registry  # noqa: F401
from mapet_mm.utils.errors import UserError

ARCH = dict(embed_dims=16, num_layers=3, num_heads=2, feedforward_channels=32)
VIT = dict(type="mmpretrain.VisionTransformer", arch=ARCH, img_size=16, patch_size=4)
RATE, LR, DECAY = 0.5, 0.1, 0.05


@pytest.fixture(scope="module")
def classifier() -> nn.Module:
    head = dict(type="mmpretrain.LinearClsHead", num_classes=3, in_channels=16)
    model = MODELS.build(dict(type="mmpretrain.ImageClassifier", backbone=VIT, head=head))
    assert isinstance(model, ImageClassifier)
    return model


@pytest.fixture(scope="module")
def segmentor() -> nn.Module:
    backbone = dict(VIT, out_type="featmap", out_indices=(0, 2))
    head = dict(
        type="mmseg.FCNHead", num_convs=1, in_channels=16, channels=8, in_index=1, num_classes=3,
        norm_cfg=dict(type="BN"), dropout_ratio=0,
    )  # fmt: skip
    model = MODELS.build(dict(type="mmseg.EncoderDecoder", backbone=backbone, decode_head=head))
    assert isinstance(model, EncoderDecoder)
    assert isinstance(model.backbone, VisionTransformer)
    return model


@pytest.fixture
def gloo(tmp_path):
    """A process group of this process alone, for the wrappers that want one."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def build(
    model: nn.Module,
    paramwise_cfg: dict | None,
    optimizer: dict | None = None,
    constructor: str = "mapet_mm.LayerDecayOptimWrapperConstructor",
):
    optimizer = optimizer or dict(type="AdamW", lr=LR, weight_decay=DECAY)
    return OPTIM_WRAPPER_CONSTRUCTORS.build(
        dict(
            type=constructor,
            optim_wrapper_cfg=dict(type="OptimWrapper", optimizer=optimizer),
            paramwise_cfg=paramwise_cfg,
        )
    )(model)


def options_by_name(model: nn.Module, paramwise_cfg: dict | None) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay of each parameter, found by identity in the optimizer's groups."""
    groups = build(model, paramwise_cfg).optimizer.param_groups
    found = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(found), "a parameter is in two groups"
    return {name: found[id(p)] for name, p in model.named_parameters() if id(p) in found}


@pytest.mark.parametrize("name", ["classifier", "segmentor"])
def test_rate_falls_by_the_factor_per_depth_and_the_head_learns_at_full_rate(name, request):
    """5 depths for 3 layers: patch embedding 0.5^4, layers 0.5^3..0.5^1, norm and everything behind 1."""
    model = request.getfixturevalue(name)
    options = options_by_name(model, dict(layer_decay_rate=RATE))
    assert set(options) == {name for name, _ in model.named_parameters()}
    scales = {
        "backbone.patch_embed": 4, "backbone.cls_token": 4, "backbone.pos_embed": 4, "backbone.layers.0.": 3,
        "backbone.layers.1.": 2, "backbone.layers.2.": 1, "backbone.ln1": 0, "head.": 0, "decode_head.": 0,
    }  # fmt: skip
    for parameter, (lr, _) in options.items():
        (power,) = [power for start, power in scales.items() if parameter.startswith(start)]
        assert lr == pytest.approx(LR * RATE**power), parameter


def compiled(model: nn.Module) -> nn.Module:
    model.backbone = torch.compile(model.backbone)
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    for i, layer in enumerate(model.backbone.layers):
        layer.attn = checkpoint_wrapper(layer.attn)
        model.backbone.layers[i] = checkpoint_wrapper(layer)
    model.backbone = torch.compile(checkpoint_wrapper(model.backbone))
    return model


def parts_in_ddp(model: nn.Module) -> nn.Module:
    model.backbone = MMDistributedDataParallel(model.backbone)  # as MMSeparateDistributedDataParallel does
    return model


def with_frozen_teacher(model: nn.Module) -> nn.Module:
    teacher = copy.deepcopy(model).requires_grad_(False)
    return nn.ModuleDict(dict(student=model, teacher=teacher))


class Detector(nn.Module):
    """A backbone behind an adapter that knows nothing of depths, as detectors have them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.backbone = nn.ModuleDict(dict(body=model.backbone, adapter=nn.Linear(16, 16)))
        self.roi_head = nn.Linear(16, 4)


WRAPPERS = [
    compiled, checkpointed, parts_in_ddp, with_frozen_teacher,
    torch.compile, checkpoint_wrapper, DistributedDataParallel, Detector, ExponentialMovingAverage,
    lambda model: SegTTAModel(module=model), lambda model: nn.ModuleDict(dict(inner=nn.Sequential(model))),
]  # fmt: skip


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__.strip("<>"))
def test_wrappers_change_no_parameters_rate_or_decay(gloo, classifier, wrap: Callable):
    """Each parameter, found by its values, learns as in the plain model, with custom keys too."""
    model = copy.deepcopy(classifier)
    for i, param in enumerate(model.parameters(), 1):
        nn.init.constant_(param, i)
    body = "backbone.body." if wrap is Detector else "backbone."
    keys = {name + "layers.1.attn": dict(lr_mult=3.0) for name in ("backbone.", body)}
    paramwise_cfg = dict(layer_decay_rate=RATE, custom_keys=keys)
    plain = {int(param.flatten()[0]): name for name, param in model.named_parameters()}
    expected = options_by_name(model, paramwise_cfg)
    expected = {number: expected[name] for number, name in plain.items()}
    wrapped = wrap(model)
    if wrap is ExponentialMovingAverage:
        wrapped.requires_grad_()
    found = {}
    for group in build(wrapped, paramwise_cfg).optimizer.param_groups:
        for param in group["params"]:
            values = param.to_local() if hasattr(param, "to_local") else param
            found[int(values.flatten()[0])] = (group["lr"], group["weight_decay"])
    for number, name in plain.items():
        if wrap is not Detector or name.startswith("backbone."):  # it has another head
            assert found[number] == expected[number], name


def test_parameters_beside_the_backbone_learn_at_the_full_rate(classifier):
    options = options_by_name(Detector(classifier), dict(layer_decay_rate=RATE))
    others = ("roi_head.weight", "backbone.adapter.weight")
    assert [options[name] for name in others] == [(LR, DECAY)] * 2


def test_depths_that_do_not_fit_the_names_are_refused(classifier):
    """Renamed layers would all learn at the full rate; a frozen backbone's depths are still known."""
    model = copy.deepcopy(classifier)
    model.backbone.requires_grad_(False)
    assert len(build(model, dict(layer_decay_rate=RATE)).optimizer.param_groups) == 2
    renamed = nn.Module()
    renamed.backbone = nn.Module()
    renamed.backbone.blocks = model.backbone.layers
    renamed.backbone.get_layer_depth = model.backbone.get_layer_depth
    with pytest.raises(ValueError, match="of `backbone` below the top"):
        build(renamed, dict(layer_decay_rate=RATE))


def test_resnets_depths_which_know_only_one_prefix():
    """MMPretrain's ResNet tells depths by names that start with `backbone.`, wherever it is."""
    resnet = MODELS.build(dict(type="mmpretrain.ResNet", depth=50, base_channels=4))
    for wrapped in (resnet, torch.compile(resnet)):
        model = nn.ModuleDict(dict(net=nn.ModuleDict(dict(backbone=wrapped))))
        options = options_by_name(model, dict(layer_decay_rate=RATE))
        assert {lr for lr, _ in options.values()} == {LR * RATE**power for power in range(1, 8)}


def test_depths_are_found_behind_lora():
    """Only the adapters of three layers and the head are trained."""
    backbone = dict(type="LoRAModel", module=VIT, rank=2, alpha=2, targets=[dict(type="qkv")])
    head = dict(type="LinearClsHead", num_classes=3, in_channels=16)
    model = MODELS.build(dict(type="mmpretrain.ImageClassifier", backbone=backbone, head=head))
    groups = build(model, dict(layer_decay_rate=RATE)).optimizer.param_groups
    assert {group["lr"] for group in groups} == {LR * RATE**power for power in (3, 2, 1, 0)}


@pytest.mark.parametrize("name", ["classifier", "segmentor"])
@pytest.mark.parametrize("paramwise_cfg", [None, dict(layer_decay_rate=RATE)])
def test_only_matrices_are_decayed_and_no_class_token_or_position_embedding(name, paramwise_cfg, request):
    model = request.getfixturevalue(name)
    options = options_by_name(model, paramwise_cfg)
    if paramwise_cfg is None:
        assert {lr for lr, _ in options.values()} == {LR}
    for parameter, tensor in model.named_parameters():
        spared = tensor.ndim == 1 or parameter in ("backbone.cls_token", "backbone.pos_embed")
        assert options[parameter][1] == (0 if spared else DECAY), parameter


SMALL = dict(embed_dim=16, depth=2, num_heads=2, patch_size=4, img_size=16)
TOKENS = {
    "registers": (
        dict(type="mapet_mm.TIMMViT", model_name="vit_small_patch14_reg4_dinov2", **SMALL),
        {"timm_model.cls_token", "timm_model.reg_token", "timm_model.pos_embed"},
    ),
    "registers, pre-training": (
        dict(
            type="mapet_mm.MaPeTPretrainTIMM", model_name="vit_small_patch16_dinov3", cutting_point=6, **SMALL
        ),
        {"timm_model.cls_token", "timm_model.reg_token"},
    ),
    "distillation": (
        dict(type="mmpretrain.DistilledVisionTransformer", arch=ARCH, img_size=16, patch_size=4),
        {"cls_token", "dist_token", "pos_embed"},
    ),
}


@pytest.mark.parametrize("kind", TOKENS)
def test_no_token_is_decayed_but_the_mask_token(kind):
    """Registers and DeiT's token are as the class token is: added to every image."""
    backbone, expected = TOKENS[kind]
    vit = MODELS.build(backbone)
    options = options_by_name(nn.ModuleDict(dict(backbone=vit)), None)
    spared = {name for name, p in vit.named_parameters() if p.ndim > 1 and not options[f"backbone.{name}"][1]}
    assert spared == expected
    if hasattr(vit, "mask_token"):
        assert options["backbone.mask_token"][1] == DECAY


def test_custom_keys_change_only_what_they_name(classifier):
    keys = {"layers.1": dict(lr_mult=0.1), "layers.1.ffn": dict(decay_mult=2.0), "head": dict(lr_mult=10)}
    options = options_by_name(classifier, dict(layer_decay_rate=RATE, custom_keys=keys))
    assert options["backbone.layers.1.attn.qkv.weight"] == pytest.approx((LR * RATE**2 * 0.1, DECAY))
    assert options["backbone.layers.1.attn.qkv.bias"] == pytest.approx((LR * RATE**2 * 0.1, 0))
    assert options["backbone.layers.1.ffn.layers.1.weight"] == pytest.approx((LR * RATE**2, DECAY * 2))
    assert options["head.fc.weight"] == pytest.approx((LR * 10, DECAY))


REFUSED = [
    (nn.Linear(2, 2), dict(layer_decay=0.5), None, "layer_decay_rate"),
    *[(nn.Linear(2, 2), dict(layer_decay_rate=rate), None, f"rate is {rate}") for rate in (-0.5, 0, 1.5)],
    (nn.Linear(2, 2), None, dict(type="AdamW", lr=LR), "weight_decay"),
    (nn.Linear(2, 2), dict(layer_decay_rate=0.9), None, "Linear has no"),
    (nn.ModuleDict({"backbone": nn.Linear(2, 2)}), dict(layer_decay_rate=0.9), None, "ModuleDict has no"),
]


@pytest.mark.parametrize(("model", "paramwise_cfg", "optimizer", "noun"), REFUSED)
def test_options_that_cannot_be_followed_are_refused(model, paramwise_cfg, optimizer, noun):
    with pytest.raises(UserError, match=noun):
        build(model, paramwise_cfg, optimizer)
    assert len(build(nn.Linear(2, 2), None).optimizer.param_groups) == 2
