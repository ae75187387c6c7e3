"""Optimizers, schedules and models that recipes build are those of docs/fidelity.md, whose entries
test_fidelity_page checks."""

import numpy as np
import pytest
import torch
from config_building import (
    RECIPES,
    TOKENIZERS,
    build_model,
    in_scope,
    label,
    learning_rates,
    load,
    optim_wrapper_of,
)
from imagenet_folder import PHOTOGRAPH
from mmcv.transforms import Compose
from mmengine.registry import DATASETS, MODELS
from mmseg.structures import SegDataSample
from PIL import Image
from timm.data import create_transform
from timm.data.transforms import RandomResizedCropAndInterpolation
from timm.scheduler import CosineLRScheduler
from torch import nn
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from mapet_mm.engine.runners.launch import configure_test

SIZES = ["tiny", "small", "base"]
STEPS = 20  # iterations of an epoch; the schedules are defined in epochs
FINE_TUNING = "mapet/benchmarks/vit-{}-p16_*b*-amp-coslr-[123]00e_in1k.py"
LINEAR_PROBE = "mapet/benchmarks/vit-{}-p16_*xb*-linear-amp-*_in1k.py"


def recipe(pattern: str, size: str = ""):
    (path,) = (path for path in RECIPES if path.match(f"configs/{pattern.format(size)}"))
    return load(path)


def rates_of(cfg, steps: int = STEPS) -> np.ndarray:
    """The learning rate of a single parameter in each iteration."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=cfg.optim_wrapper.optimizer.lr)
    return learning_rates(cfg, optimizer, steps)[:, 0]


# What the authors give timm's `create_scheduler`: peak rate, epochs, minimal rate, epochs of warm-up. The
# warm-up starts at 1e-6, and a cool-down of ten epochs is the default of their options.
PRETRAINING_CURVE = (1.5e-3, 300, 1e-5, 10)
FINE_TUNING_CURVES = {
    "tiny": (2.5e-4, 300, 1e-6, 20),
    "small": (5e-3, 200, 1e-6, 20),
    "base": (5e-4, 100, 1e-6, 20),
}
COOLDOWN = 10
METHODS = ("mapet", "pim", "mim", "beit", "cae")


def timm_rates(curve: tuple, scales: np.ndarray) -> np.ndarray:
    """Rates `(epochs, groups)` of the authors' training, with timm's `lr_scale` for each parameter group."""
    peak, epochs, minimum, warmup = curve
    groups = [dict(params=[nn.Parameter(torch.zeros(1))], lr_scale=scale) for scale in scales]
    optimizer = torch.optim.AdamW(groups, lr=peak)
    scheduler = CosineLRScheduler(
        optimizer, t_initial=epochs, lr_min=minimum, warmup_t=warmup, warmup_lr_init=1e-6
    )
    rates = []
    for epoch in range(epochs + COOLDOWN):
        rates.append([group["lr"] for group in optimizer.param_groups])
        scheduler.step(epoch + 1)
    return np.array(rates)


def assert_rates_are_timms(cfg, curve: tuple) -> np.ndarray:
    """Compare every epoch and parameter group of a recipe's real optimizer; returns each group's share.

    The recipes give the step from the peak onto the cosine with seven digits: from there on 1e-7 holds.
    """
    assert all(
        "end" in scheduler for scheduler in cfg.param_scheduler
    )  # MMEngine's default is the training's
    wrapper = optim_wrapper_of(cfg, build_model(cfg))
    shares = np.array([group["lr"] for group in wrapper.param_groups]) / curve[0]
    rates = learning_rates(cfg, wrapper, steps=2)
    np.testing.assert_array_equal(rates[::2], rates[1::2])  # the rate changes once an epoch
    expected, warmup = timm_rates(curve, shares), curve[3]
    np.testing.assert_allclose(rates[: 2 * warmup : 2], expected[:warmup], rtol=1e-12)
    np.testing.assert_allclose(rates[::2], expected, rtol=1e-7)
    return shares


def trained(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("method", METHODS)
def test_pretraining_rates_are_timms_as_the_authors_call_it(method):
    cfg = recipe(f"{method}/{method}_vit-tiny-p16_kclip_*")
    assert set(assert_rates_are_timms(cfg, PRETRAINING_CURVE)) == {1.0}
    others = [load(path) for path in RECIPES if path.parent.name == method]
    assert len(others) >= 6
    for other in others:
        assert other.param_scheduler == cfg.param_scheduler
        assert other.optim_wrapper.optimizer.lr == cfg.optim_wrapper.optimizer.lr
        assert other.train_cfg.max_epochs == cfg.train_cfg.max_epochs


@pytest.mark.parametrize("size", SIZES)
def test_fine_tuning_rates_are_timms_as_the_authors_call_it_in_every_layer(size):
    shares = assert_rates_are_timms(recipe(FINE_TUNING, size), FINE_TUNING_CURVES[size])
    # The patch embedding is 13 steps of layer-wise decay below the head.
    decay = 1.0 if size == "tiny" else 0.65
    assert sorted(set(shares)) == pytest.approx(sorted({decay**depth for depth in range(14)}))


@pytest.mark.parametrize("size", SIZES)
def test_pretraining_model_is_the_papers(size):
    cfg = recipe("mapet/mapet_vit-{}-p16_kclip_*", size)
    vit, width = build_model(cfg).backbone, dict(tiny=192, small=384, base=768)[size]
    assert (len(vit.layers), vit.embed_dims, vit.layers[0].attn.num_heads) == (12, width, width // 64)
    assert vit.layers[0].ffn.feedforward_channels == 4 * width
    assert (vit.patch_resolution, vit.num_tokens) == ((14, 14), 197)
    drops = [getattr(layer.attn.out_drop, "drop_prob", 0.0) for layer in vit.layers]
    assert drops == pytest.approx([0.1 * layer / 11 for layer in range(12)])


def test_pretraining_decays_no_bias_norm_class_token_or_position():
    cfg = recipe("mapet/mapet_vit-tiny-p16_kclip_*")
    model = build_model(cfg)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = optim_wrapper_of(cfg, model).optimizer.param_groups
    decay = {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}
    free = {name for name, p in model.named_parameters() if p.ndim == 1}
    free |= {"backbone.cls_token", "backbone.pos_embed"}
    assert decay == {name: 0 if name in free else 0.05 for name in names.values()}
    assert {group["lr"] for group in groups} == {1.5e-3}


@pytest.mark.parametrize(
    ("size", "width", "parameters"),
    [("tiny", 192, 5_145_536), ("small", 384, 17_360_768), ("base", 768, 63_024_896)],
)
def test_caes_regressor_and_decoder_are_as_wide_as_the_encoder(size, width, parameters):
    """As in CAE's code: 4 + 4 layers with the encoder's heads and drop rates, and nothing to project."""
    cfg = recipe("cae/cae_vit-{}-p16_kclip_*", size)
    with in_scope(cfg):
        neck = MODELS.build(cfg.model.neck)
    assert (neck.embed_dim, neck.regressors[0].cross_attn.num_heads) == (width, width // 64)
    assert isinstance(neck.encoder_to_neck, nn.Identity)
    assert sum(parameter.numel() for parameter in neck.parameters()) == parameters
    for layers in (neck.regressors, neck.decoders):
        drops = [layer.drop_path.drop_prob for layer in layers]
        assert drops == pytest.approx([0.0, 0.1 / 3, 0.2 / 3, 0.1])
    assert neck.regressors[0].gamma_1_cross.unique().tolist() == pytest.approx([0.1])


def test_caes_positions_are_fixed_and_its_teacher_follows_at_once():
    model = build_model(recipe("cae/cae_vit-tiny-p16_kclip_*"))
    assert (model.momentum, model.neck_positions.shape) == (0.0, (1, 196, 192))
    assert not model.backbone.pos_embed.requires_grad


@pytest.mark.parametrize(
    ("pattern", "crop"),
    [(FINE_TUNING, 0.9), ("scratch/vit-{}-p16_*", 0.875), (LINEAR_PROBE, 0.875)],
)
def test_evaluation_sees_the_share_of_the_image_that_timm_crops(pattern, crop):
    """Fine-tuning 248 -> 224, as the authors' `validate.py`; DeiT and BEiT's linear probe 256 -> 224."""
    cfg = recipe(pattern, "base")
    assert cfg.val_dataloader.dataset.pipeline == cfg.test_dataloader.dataset.pipeline
    transform = create_transform(224, crop_pct=crop, interpolation="bicubic", mean=(0, 0, 0), std=(1, 1, 1))
    expected = 255 * transform(Image.fromarray(PHOTOGRAPH)).numpy().transpose(1, 2, 0)
    image = dict(img=np.ascontiguousarray(PHOTOGRAPH[..., ::-1]))
    with in_scope(cfg):
        seen = Compose(cfg.val_dataloader.dataset.pipeline[1:-1])(image)["img"][..., ::-1]
    np.testing.assert_allclose(seen, expected, atol=1e-3)


def seen_by(steps: list, size: tuple[int, int]) -> tuple[np.ndarray, Image.Image]:
    """RGB pixels of a noisy image after some steps, and the image."""
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    with in_scope(recipe("mapet/mapet_vit-tiny-p16_kclip_*")):
        seen = Compose(steps)(dict(img=np.ascontiguousarray(image[..., ::-1])))["img"][..., ::-1]
    return seen, Image.fromarray(image)


# Sides that differ by 1 and by 3 modulo 4, where rounding and flooring part.
SHAPES = [(333, 500), (500, 333), (375, 500), (500, 375)]


@pytest.mark.parametrize("size", SHAPES)
def test_pretraining_sees_the_square_of_the_authors(size):
    """Their random crop of scale 1 and ratio 1 falls back to the centre, rounded down."""
    square = recipe("mapet/mapet_vit-tiny-p16_kclip_*").load_square[1:]
    theirs = RandomResizedCropAndInterpolation(224, scale=(1, 1), ratio=(1, 1), interpolation="bicubic")
    seen, image = seen_by(square, size)
    np.testing.assert_array_equal(seen, np.asarray(theirs(image)))


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize(("name", "pixels"), [("kclip", 448), ("vqkd", 224), ("dalle", 112)])
def test_tokenizers_see_the_square_of_torchvisions_crop(name, pixels, size):
    (path,) = (path for path in TOKENIZERS if path.match(f"configs/tokenizers/{name}_*"))
    theirs = transforms.Compose(
        [transforms.Resize(pixels, InterpolationMode.BICUBIC), transforms.CenterCrop(pixels)]
    )
    seen, image = seen_by(load(path).tokenizer_square, size)
    np.testing.assert_array_equal(seen, np.asarray(theirs(image)))


def test_linear_probe_is_beits_on_all_twelve_layers():
    cfg = recipe(LINEAR_PROBE, "base")
    expected = 2e-3 * (1 + np.cos(np.pi * np.arange(50) / 50))
    np.testing.assert_allclose(rates_of(cfg), expected.repeat(STEPS), rtol=1e-6)
    model = build_model(cfg).train()
    assert (model.backbone.out_type, model.backbone.final_norm) == ("raw", False)
    assert (model.backbone.out_indices, model.head.layers) == (list(range(12)), list(range(1, 13)))
    assert model.head.inference_layer == 12
    shapes = {"weight": (1000, 2 * 768), "bias": (1000,)}
    assert trained(model) == {f"head.classifiers.{i}.{k}": s for i in range(12) for k, s in shapes.items()}
    (group,) = optim_wrapper_of(cfg, model).optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (4e-3, 1e-4)


@pytest.mark.parametrize(("name", "classes"), [("cars", 196), ("food101", 101), ("aircraft", 100)])
def test_linear_probes_of_other_data_sets_differ_from_imagenets_in_data_and_classes(name, classes):
    path = "mapet/benchmarks/vit-base-p16_8xb128-linear-amp-coslr-50e_{}.py"
    ours, imagenet = recipe(path, name), recipe(path, "in1k")
    for key in ("optim_wrapper", "param_scheduler", "train_cfg", "auto_scale_lr"):
        assert ours[key] == imagenet[key], key
    assert ours.train_dataloader.dataset.pipeline == imagenet.train_dataloader.dataset.pipeline
    data_set = DATASETS.get(f"mmpretrain.{ours.train_dataloader.dataset.type}")
    assert len(data_set.METAINFO["classes"]) == ours.model.head.num_classes == classes


def test_segmentation_warms_up_and_decays_linearly_to_zero():
    rates = rates_of(recipe("segmentation/mapet_vit-base-p16_upernet_*"), 160_000)
    places = [0, 1_499, (1_500 + 160_000) // 2, -1]
    assert rates[places] == pytest.approx([5e-11, 5e-5, 2.5e-5, 0], rel=1e-4, abs=1e-9)


@pytest.mark.parametrize(("data", "classes"), [("ade20k", 150), ("voc12", 21), ("cityscapes", 19)])
def test_linear_segmentation_is_dinov3s(data, classes):
    model = build_model(recipe(f"segmentation/vit-base-p16_linear_*_{data}-*")).train()
    assert trained(model) == {
        "neck.norm.weight": (768,),
        "neck.norm.bias": (768,),
        "decode_head.conv_seg.weight": (classes, 768, 1, 1),
        "decode_head.conv_seg.bias": (classes,),
    }
    assert not any(module.training for module in model.backbone.modules())
    assert (model.neck.dropout.p, model.decode_head.dropout) == (0.1, None)
    assert (model.backbone.final_norm, model.backbone.out_indices) == (True, [11])


@pytest.mark.parametrize("path", [path for path in RECIPES if path.parent.name == "segmentation"], ids=label)
def test_every_segmentation_recipe_can_be_augmented(path, tmp_path):
    """At half the size, 341 columns are not whole patches."""
    cfg = load(path)
    segmentor, usual = cfg.model, cfg.test_dataloader.dataset.pipeline
    _, (scales, flips, (labels,), _) = (step.get("transforms") for step in cfg.tta_pipeline)
    factors = (0.5, 0.75, 1, 1.25, 1.5, 1.75)
    assert [tuple(step.scale) for step in scales] == [
        (int(2048 * by), int(usual[1].scale[1] * by)) for by in factors
    ]
    assert all(step.type == "Resize" and step.keep_ratio for step in scales)
    assert ([step.prob for step in flips], labels) == ([0, 1], usual[2])
    half = dict(inputs=[torch.zeros(3, 256, 341)], data_samples=[SegDataSample()])
    with in_scope(cfg):
        preprocessor = MODELS.build(segmentor.data_preprocessor)
    padded = preprocessor(half)
    # To the crop's size, or to whole patches; it is cut off again.
    height, width = segmentor.data_preprocessor.test_cfg.get("size", (256, 352))
    assert padded["inputs"].shape[2:] == (height, width)
    assert padded["data_samples"][0].img_padding_size == (0, width - 341, 0, height - 256)
    torch.save(dict(state_dict=dict(weight=torch.zeros(1))), tmp_path / "weights.pth")
    configure_test(cfg, str(tmp_path / "weights.pth"), tta=True)
    assert (cfg.model.type, cfg.model.module) == ("SegTTAModel", segmentor)
    assert cfg.test_dataloader.dataset.pipeline[1].type == "TestTimeAug"
    assert cfg.val_dataloader.dataset.pipeline[1].type == "Resize"
