"""Each recipe's step on a pretended GPU: nothing is left on the host, and it is the host's step."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from config_building import RECIPES, in_scope, label, load, optim_wrapper_of
from mmengine.config import Config
from mmengine.registry import MODELS
from mmengine.structures import PixelData
from mmpretrain.structures import DataSample
from mmseg.structures import SegDataSample
from pretended_gpu import OnGPU, pretended_gpu, recorded_waits
from torch import nn

MICRO = [path for path in RECIPES if path.parent.name == "micro"]
BATCH = 3


def build(cfg: Config) -> nn.Module:
    """As MMEngine's Runner does."""
    model = cfg.model.copy()
    if "data_preprocessor" in cfg:
        model.setdefault("data_preprocessor", cfg.data_preprocessor)
    with in_scope(cfg):
        return MODELS.build(model)


def batch_of(cfg: Config) -> dict:
    """Random images, or token grids for classifiers of tokens, with labels, tokens and masks."""
    rng = np.random.default_rng(0)
    backbone = cfg.model.backbone
    if "Token" in backbone.type:
        grid = backbone.get("grid", 6)
        inputs = [torch.from_numpy(rng.integers(0, 64, (1, grid, grid))) for _ in range(BATCH)]
    else:
        side = cfg.get("crop_size", (backbone.img_size,) * 2)[0]
        inputs = [torch.from_numpy(rng.integers(0, 256, (3, side, side), np.uint8)) for _ in range(BATCH)]
    if cfg.default_scope == "mmseg":
        return dict(inputs=inputs, data_samples=[scene(rng, side, cfg) for _ in range(BATCH)])
    grid = 6
    samples = []
    for index in range(BATCH):
        sample = DataSample().set_gt_label(index)
        sample.set_field(rng.integers(0, 64, (grid, grid)), "token_grid")
        hidden = np.zeros(grid**2, np.int64)
        hidden[rng.permutation(grid**2)[: (cfg.model.get("neck") or {}).get("mask_tokens_num", 14)]] = 1
        samples.append(sample.set_mask(torch.from_numpy(hidden.reshape(grid, grid))))
    return dict(inputs=inputs, data_samples=samples)


def scene(rng: np.random.Generator, side: int, cfg: Config) -> SegDataSample:
    labels = torch.from_numpy(rng.integers(0, cfg.model.decode_head.num_classes, (1, side, side)))
    sample = SegDataSample(gt_sem_seg=PixelData(data=labels))
    sample.set_metainfo(dict(img_shape=(side, side), ori_shape=(side, side), pad_shape=(side, side)))
    return sample


def step(model: nn.Module, cfg: Config, device: str) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Losses and new weights of one step of the recipe's optimizer; also that nothing is elsewhere."""
    torch.manual_seed(1)
    model = copy.deepcopy(model).to(device)
    model.train()
    wrapper = optim_wrapper_of(cfg, model)
    logs = model.train_step(batch_of(cfg), wrapper)
    if device == "cuda":
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, OnGPU), name
            assert parameter.grad is None or isinstance(parameter.grad, OnGPU), name
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    return {name: value.item() for name, value in logs.items()}, weights


def check_step(cfg: Config) -> None:
    torch.manual_seed(0)
    model = build(cfg)
    losses, weights = step(model, cfg, "cpu")
    with pretended_gpu():
        losses_on_gpu, weights_on_gpu = step(model, cfg, "cuda")
    assert np.isfinite(losses["loss"])
    assert losses_on_gpu == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(weights_on_gpu, weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("path", MICRO, ids=label)
def test_a_step_of_a_recipe_is_the_hosts(path: Path):
    cfg = load(path)
    if cfg.model.backbone.get("init_cfg"):
        cfg.model.backbone.init_cfg = None
    check_step(cfg)


OBJECTIVES = [path for path in MICRO if path.stem.startswith(("mapet_", "mim_", "pim_"))]


@pytest.mark.parametrize("path", OBJECTIVES, ids=label)
def test_after_the_first_step_the_host_waits_for_no_value_in_forward_and_backward_pass(path: Path):
    """Else the GPU runs dry in each step, as its next kernels are not asked for yet. The first is checked."""
    cfg = load(path)
    with pretended_gpu():
        model = build(cfg).to("cuda")
        data = model.data_preprocessor(batch_of(cfg), training=True)
        for _ in range(2):
            with recorded_waits() as waits:
                model.parse_losses(model(**data, mode="loss"))[0].backward()
    assert waits == []
