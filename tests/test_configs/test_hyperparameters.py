"""The recipes hold the paper's hyper-parameters: its tables against real optimizers and schedulers."""

import numpy as np
import pytest
import torch
from config_building import (
    RECIPES,
    build_model,
    gpus_and_batch,
    in_scope,
    label,
    learning_rates,
    load,
    optim_wrapper_of,
)
from imagenet_folder import PHOTOGRAPH
from mmcv.transforms import Compose
from PIL import Image
from timm.data import create_transform
from torch import nn

SIZES = ["tiny", "small", "base"]
WIDTHS = dict(tiny=192, small=384, base=768)
# Paper, "Hyperparameters for fine-tuning": peak rate, epochs, layer-wise decay.
FINETUNING = dict(tiny=(2.5e-4, 300, 1.0), small=(5e-3, 200, 0.65), base=(5e-4, 100, 0.65))
STEPS = 20  # iterations of an epoch; the schedules are defined in epochs


def recipe(pattern: str):
    (path,) = (path for path in RECIPES if path.match(pattern))
    return path, load(path)


def pretraining(size: str):
    return recipe(f"configs/mapet/mapet_vit-{size}-p16_kclip_*")


def fine_tuning(size: str):
    return recipe(f"configs/mapet/benchmarks/vit-{size}-p16_*b*-amp-coslr-[123]00e_in1k.py")


def from_scratch(size: str):
    return recipe(f"configs/scratch/vit-{size}-p16_*")


def linear_probe(size: str, kind: str = "linear"):
    return recipe(f"configs/mapet/benchmarks/vit-{size}-p16_*xb*-{kind}-amp-*_in1k.py")


def segmentation(size: str):
    return recipe(f"configs/segmentation/mapet_vit-{size}-p16_upernet_*")


def assert_adamw(cfg, weight_decay: float, clip: float | None = None) -> None:
    optimizer = cfg.optim_wrapper.optimizer
    assert optimizer.type == "AdamW"
    assert (tuple(optimizer.betas), optimizer.eps) == ((0.9, 0.999), 1e-8)
    assert optimizer.weight_decay == weight_decay
    assert cfg.optim_wrapper.get("clip_grad") == (None if clip is None else dict(max_norm=clip))


def assert_batch(path, cfg, total: int) -> None:
    """The name, the loader and `--auto-scale-lr` agree on the paper's total batch."""
    gpus, batch = gpus_and_batch(path)
    assert gpus * batch == total
    assert cfg.train_dataloader.batch_size == batch
    assert cfg.auto_scale_lr.base_batch_size == total


def stochastic_depth(vit: nn.Module) -> list[float]:
    """Drop rate of each layer's attention branch."""
    return [getattr(layer.attn.out_drop, "drop_prob", 0.0) for layer in vit.layers]


def step_of(cfg, name: str, loader: str = "train_dataloader"):
    (step,) = (step for step in cfg[loader].dataset.pipeline if step.type == name)
    return step


def one_group(lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=lr)


@pytest.mark.parametrize("size", SIZES)
def test_pretraining_model_is_the_papers(size):
    vit = build_model(pretraining(size)[1]).backbone
    assert (len(vit.layers), vit.embed_dims) == (12, WIDTHS[size])
    assert WIDTHS[size] // vit.layers[0].attn.num_heads == 64
    assert vit.layers[0].ffn.feedforward_channels == 4 * WIDTHS[size]
    assert (vit.patch_resolution, vit.num_tokens) == ((14, 14), 197)
    assert vit.cutting_point == dict(tiny=50, small=50, base=60)[size]
    assert stochastic_depth(vit) == pytest.approx([0.1 * layer / 11 for layer in range(12)])


@pytest.mark.parametrize("size", SIZES)
def test_pretraining_schedule_is_the_papers(size):
    path, cfg = pretraining(size)
    assert_adamw(cfg, weight_decay=0.05, clip=3.0)
    assert_batch(path, cfg, 2048)
    assert gpus_and_batch(path)[0] == dict(tiny=16, small=32, base=64)[size]
    rates = learning_rates(cfg, one_group(cfg.optim_wrapper.optimizer.lr), STEPS)[:, 0]
    assert len(rates) == 300 * STEPS
    assert rates[0] == pytest.approx(1e-6)
    assert rates[10 * STEPS - 1] == pytest.approx(1.5e-3)
    assert rates[155 * STEPS] == pytest.approx((1.5e-3 + 1e-5) / 2)  # half of the cosine
    assert rates[-1] == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize("path", [p for p in RECIPES if p.parent.name in ("mim", "beit", "cae")], ids=label)
def test_masking_hides_as_many_patches_as_the_authors_do(path):
    """MIM 75 of 196 at random, BEiT 75 in blocks of at least 16, CAE 98, half of them."""
    cfg = load(path)
    if path.parent.name == "mim":
        vit = build_model(cfg).backbone
        assert (vit.objective.name, vit.num_targets, vit.cutting_point) == ("mim", 75, 122)
        assert not [s for s in cfg.train_dataloader.dataset.pipeline if s.type == "mapet_mm.BlockwiseMask"]
        return
    masked = dict(beit=75, cae=98)[path.parent.name]
    mask = step_of(cfg, "mapet_mm.BlockwiseMask")
    assert (mask.input_size, mask.num_masking_patches, mask.min_num_patches) == (14, masked, 16)
    assert path.parent.name == "beit" or cfg.model.neck.mask_tokens_num == masked


def test_cae_is_the_authors():
    """Width 384, 6 heads, 4 + 4 layers at every size, with the encoder's drop rates; twice the alignment."""
    tiny, *others = (recipe(f"configs/cae/cae_vit-{size}-p16_kclip_*")[1] for size in SIZES)
    for cfg, width in zip(others, (384, 768), strict=True):
        assert cfg.model.neck == dict(tiny.model.neck, encoder_dims=width)
    model = build_model(tiny)
    neck, rates = model.neck, [0.0, 0.1 / 3, 0.2 / 3, 0.1]
    assert (neck.embed_dim, neck.regressors[0].cross_attn.num_heads) == (384, 6)
    assert [layer.drop_path.drop_prob for layer in neck.regressors] == pytest.approx(rates)
    assert [layer.drop_path.drop_prob for layer in neck.decoders] == pytest.approx(rates)
    assert model.backbone.layers[-1].drop_path.drop_prob == pytest.approx(0.1)
    assert neck.regressors[0].gamma_1_cross.unique().tolist() == pytest.approx([0.1])
    assert (model.head.loss_module.lambd, model.momentum) == (2, 0.0)
    assert model.neck_positions.shape == (1, 196, 384)
    assert not model.backbone.pos_embed.requires_grad


def test_pretraining_decays_no_bias_norm_class_token_or_position():
    """No decay on any 1-D parameter, class token and position embedding; the mask token is decayed."""
    _, cfg = pretraining("tiny")
    model = build_model(cfg)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = optim_wrapper_of(cfg, model).optimizer.param_groups
    decay = {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}
    free = {name for name, p in model.named_parameters() if p.ndim == 1}
    assert decay.keys() == set(names.values())
    assert {name for name, value in decay.items() if value == 0} == free | {
        "backbone.cls_token",
        "backbone.pos_embed",
    }
    assert {value for value in decay.values() if value} == {0.05}
    assert {group["lr"] for group in groups} == {1.5e-3}


@pytest.mark.parametrize("size", SIZES)
def test_fine_tuning_schedule_is_the_papers_in_every_layer(size):
    path, cfg = fine_tuning(size)
    peak, epochs, layer_decay = FINETUNING[size]
    assert_adamw(cfg, weight_decay=0.05)
    assert_batch(path, cfg, 1024)
    optimizer = optim_wrapper_of(cfg, build_model(cfg))
    rates = learning_rates(cfg, optimizer, STEPS)
    assert len(rates) == epochs * STEPS
    # The head's rate, and the patch embedding's: 13 steps of layer-wise decay below it at all times.
    for group, share in ((rates.max(axis=1), 1.0), (rates.min(axis=1), layer_decay**13)):
        assert group[0] == pytest.approx(1e-6 * share)
        assert group[20 * STEPS - 1] == pytest.approx(peak * share)
        assert group[-1] == pytest.approx(1e-6 * share, rel=2e-2)
    assert len(set(rates[0])) == (1 if layer_decay == 1 else 14)


TASKS = [(fine_tuning, 0.9), (from_scratch, 0.875), (linear_probe, 0.875)]


@pytest.mark.parametrize(("task", "crop"), TASKS)
@pytest.mark.parametrize("size", SIZES)
def test_evaluation_sees_the_share_of_the_image_that_timm_crops(size, task, crop):
    """Fine-tuning 248 -> 224, as the authors' `validate.py`; DeiT and BEiT's linear probe 256 -> 224."""
    _, cfg = task(size)
    assert cfg.val_dataloader.dataset.pipeline == cfg.test_dataloader.dataset.pipeline
    transform = create_transform(224, crop_pct=crop, interpolation="bicubic", mean=(0, 0, 0), std=(1, 1, 1))
    expected = 255 * transform(Image.fromarray(PHOTOGRAPH)).numpy().transpose(1, 2, 0)
    image = dict(img=np.ascontiguousarray(PHOTOGRAPH[..., ::-1]))
    with in_scope(cfg):
        seen = Compose(cfg.val_dataloader.dataset.pipeline[1:-1])(image)["img"][..., ::-1]
    np.testing.assert_allclose(seen, expected, atol=1e-3)


@pytest.mark.parametrize("kind", ["linear", "linear-mean"])
@pytest.mark.parametrize("size", SIZES)
def test_linear_probe_is_the_papers(size, kind):
    """Rate, decay, epochs; one step of the cosine an epoch, as in BEiT's script; 256 -> 224 in the test."""
    path, cfg = linear_probe(size, kind)
    assert_adamw(cfg, weight_decay=1e-4)
    assert_batch(path, cfg, 1024)
    rates = learning_rates(cfg, one_group(cfg.optim_wrapper.optimizer.lr), STEPS)[:, 0]
    expected = 2e-3 * (1 + np.cos(np.pi * np.arange(50) / 50))
    np.testing.assert_allclose(rates, expected.repeat(STEPS), rtol=1e-6)
    kinds = [step.type for step in cfg.train_dataloader.dataset.pipeline]
    assert kinds == ["LoadImageFromFile", "RandomResizedCrop", "RandomFlip", "PackInputs"]
    for loader in ("val_dataloader", "test_dataloader"):
        kinds = [step.type for step in cfg[loader].dataset.pipeline]
        assert kinds == ["LoadImageFromFile", "ResizeEdge", "CenterCrop", "PackInputs"]
        assert step_of(cfg, "ResizeEdge", loader).scale == 256
        assert step_of(cfg, "CenterCrop", loader).crop_size == 224


@pytest.mark.parametrize("size", SIZES)
def test_linear_probe_is_beits_on_all_twelve_layers(size):
    """A linear layer per transformer layer, on class token and patch mean; all with one rate and decay."""
    _, cfg = linear_probe(size)
    model = build_model(cfg).train()
    assert model.backbone.out_indices == list(range(12))
    assert (model.backbone.out_type, model.backbone.final_norm) == ("raw", False)
    assert model.head.layers == list(range(1, 13))
    assert (model.head.pooling, model.head.inference_layer) == ("both", 12)
    assert {classifier.weight.shape for classifier in model.head.classifiers} == {(1000, 2 * WIDTHS[size])}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    (group,) = optim_wrapper_of(cfg, model).optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (4e-3, 1e-4)
    trained = {names[id(parameter)] for parameter in group["params"] if parameter.requires_grad}
    assert trained == {f"head.classifiers.{i}.{kind}" for i in range(12) for kind in ("weight", "bias")}
    assert cfg.val_evaluator == cfg.test_evaluator == dict(type="mapet_mm.LayerwiseAccuracy")


@pytest.mark.parametrize("path", [path for path in RECIPES if "-linear-" in path.stem], ids=label)
def test_linear_probe_moves_nothing_of_its_backbone(path):
    """In training mode too: no gradient, evaluation mode, no batch statistics."""
    model = build_model(load(path)).train()
    assert model.head.training
    assert not any(module.training for module in model.backbone.modules())
    assert not any(parameter.requires_grad for parameter in model.backbone.parameters())
    assert not any(isinstance(module, nn.modules.batchnorm._NormBase) for module in model.modules())


def test_segmentation_warms_up_and_decays_linearly_to_zero():
    """5e-11 to 5e-5 in 1,500 iterations, then linearly to 0 at iteration 160,000."""
    _, cfg = segmentation("base")
    rates = learning_rates(cfg, one_group(5e-5), 160_000)[:, 0]
    assert rates[0] == pytest.approx(5e-11)
    assert rates[1_499] == pytest.approx(5e-5)
    assert rates[(1_500 + 160_000) // 2] == pytest.approx(2.5e-5, rel=1e-4)
    assert 0 <= rates[-1] < 1e-9


@pytest.mark.parametrize(("data", "classes"), [("ade20k", 150), ("voc12", 21), ("cityscapes", 19)])
@pytest.mark.parametrize("size", SIZES)
def test_linear_segmentation_is_dinov3s(size, data, classes):
    """AdamW at 1e-3 for 40,000 iterations of 16; only BatchNorm and a 1 x 1 convolution learn."""
    path, cfg = recipe(f"configs/segmentation/vit-{size}-p16_linear_*_{data}-*")
    assert_adamw(cfg, weight_decay=1e-3)
    assert_batch(path, cfg, 16)
    model = build_model(cfg).train()
    width = model.backbone.embed_dims
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert shapes == {
        "neck.norm.weight": (width,),
        "neck.norm.bias": (width,),
        "decode_head.conv_seg.weight": (classes, width, 1, 1),
        "decode_head.conv_seg.bias": (classes,),
    }
    assert not any(module.training for module in model.backbone.modules())
    assert (model.neck.dropout.p, model.decode_head.dropout) == (0.1, None)
    assert model.backbone.final_norm
    assert model.backbone.out_indices == [11]
    assert cfg.model.test_cfg == dict(mode="slide", crop_size=(512, 512), stride=(341, 341))
