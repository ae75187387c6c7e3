"""Optimizers, schedules and models that recipes build are the paper's; test_fidelity_page has the entries."""

import numpy as np
import pytest
import torch
from config_building import RECIPES, build_model, in_scope, label, learning_rates, load, optim_wrapper_of
from imagenet_folder import PHOTOGRAPH
from mmcv.transforms import Compose
from mmengine.registry import DATASETS
from PIL import Image
from timm.data import create_transform
from torch import nn

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


def trained(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("size", SIZES)
def test_pretraining_model_and_schedule_are_the_papers(size):
    cfg = recipe("mapet/mapet_vit-{}-p16_kclip_*", size)
    vit, width = build_model(cfg).backbone, dict(tiny=192, small=384, base=768)[size]
    assert (len(vit.layers), vit.embed_dims, vit.layers[0].attn.num_heads) == (12, width, width // 64)
    assert vit.layers[0].ffn.feedforward_channels == 4 * width
    assert (vit.patch_resolution, vit.num_tokens) == ((14, 14), 197)
    drops = [getattr(layer.attn.out_drop, "drop_prob", 0.0) for layer in vit.layers]
    assert drops == pytest.approx([0.1 * layer / 11 for layer in range(12)])
    rates = rates_of(cfg)
    assert len(rates) == 300 * STEPS
    places = [0, 10 * STEPS - 1, 155 * STEPS, -1]  # start, end of the warm-up, half of the cosine, end
    assert rates[places] == pytest.approx([1e-6, 1.5e-3, (1.5e-3 + 1e-5) / 2, 1e-5], rel=1e-3)


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


def test_cae_is_the_authors():
    """Width 384, 6 heads, 4 + 4 layers at every size, with the encoder's drop rates; twice the alignment."""
    tiny, *others = (recipe("cae/cae_vit-{}-p16_kclip_*", size) for size in SIZES)
    for cfg, width in zip(others, (384, 768), strict=True):
        assert cfg.model.neck == dict(tiny.model.neck, encoder_dims=width)
    model = build_model(tiny)
    for layers in (model.neck.regressors, model.neck.decoders):
        drops = [layer.drop_path.drop_prob for layer in layers]
        assert drops == pytest.approx([0.0, 0.1 / 3, 0.2 / 3, 0.1])
    assert model.neck.regressors[0].gamma_1_cross.unique().tolist() == pytest.approx([0.1])
    assert (model.momentum, model.neck_positions.shape) == (0.0, (1, 196, 384))
    assert not model.backbone.pos_embed.requires_grad


@pytest.mark.parametrize(
    ("size", "peak", "epochs", "decay"),
    [("tiny", 2.5e-4, 300, 1.0), ("small", 5e-3, 200, 0.65), ("base", 5e-4, 100, 0.65)],
)
def test_fine_tuning_schedule_is_the_papers_in_every_layer(size, peak, epochs, decay):
    cfg = recipe(FINE_TUNING, size)
    rates = learning_rates(cfg, optim_wrapper_of(cfg, build_model(cfg)), STEPS)
    assert len(rates) == epochs * STEPS
    # The head's rate, and the patch embedding's: 13 steps of layer-wise decay below it at all times.
    for group, share in ((rates.max(axis=1), 1.0), (rates.min(axis=1), decay**13)):
        expected = np.array([1e-6, peak, 1e-6]) * share
        assert group[[0, 20 * STEPS - 1, -1]] == pytest.approx(expected, rel=2e-2)
    assert len(set(rates[0])) == (1 if decay == 1 else 14)


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
def test_every_segmentation_recipe_can_be_augmented(path):
    cfg = load(path)
    segmentor, usual = cfg.model, cfg.test_dataloader.dataset.pipeline
    _, (scales, _, flips, (labels,), _) = (step.get("transforms") for step in cfg.tta_pipeline)
    factors = (0.5, 0.75, 1, 1.25, 1.5, 1.75)
    assert [tuple(step.scale) for step in scales] == [
        (int(2048 * by), int(usual[1].scale[1] * by)) for by in factors
    ]
    assert all(step.type == "Resize" and step.keep_ratio for step in scales)
    assert ([step.prob for step in flips], labels) == ([0, 1], usual[2])
    configure_test(cfg, "https://x/y.pth", tta=True)
    assert (cfg.model.type, cfg.model.module) == ("SegTTAModel", segmentor)
    assert cfg.test_dataloader.dataset.pipeline[1].type == "TestTimeAug"
    assert cfg.val_dataloader.dataset.pipeline[1].type == "Resize"
