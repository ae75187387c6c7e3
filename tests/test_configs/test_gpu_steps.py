"""Each small recipe's losses on a GPU, by tensors that have shapes and a device but no values.

Without a GPU this finds tensors of two devices in one operation, and waits for a value of the device. PyTorch
runs no backward pass of such tensors where there is no GPU.
"""

import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from config_building import RECIPES, in_scope, label, load
from mmengine.config import Config
from mmengine.registry import MODELS
from mmpretrain.structures import DataSample
from step_counts import StepCounts, fake_gpu
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

# Segmentors and CAE index with masks in their libraries' code, timm reads values while it is built, and
# fine-tunings mix images by values.
SKIPPED = re.compile(r"cae_|mapet_timm|vit-micro_1xb(50|64)")
MICRO = [path for path in RECIPES if path.parent.name == "micro" and not SKIPPED.match(path.stem)]
MICRO = [path for path in MICRO if load(path).default_scope == "mmpretrain"]
BATCH, GRID = 2, 6


def build(cfg: Config) -> nn.Module:
    """The recipe's model, as after its first step, in which some values are looked at."""
    settings = cfg.model.copy()
    if settings.backbone.get("init_cfg"):
        settings.backbone.init_cfg = None
    if "data_preprocessor" in cfg:
        settings.setdefault("data_preprocessor", cfg.data_preprocessor)
    with in_scope(cfg):
        model = MODELS.build(settings).train()
    model.data_preprocessor.to("cuda")
    for module in model.modules():
        module.values_checked = True
    for name in ("pixel_range", "second_pixel_range"):
        setattr(model.data_preprocessor, name, Mock())
    return model


def batch_of(cfg: Config) -> dict:
    """Images, or token grids for classifiers of tokens, with labels, tokens and masks, on the host."""
    backbone = cfg.model.backbone
    if "Token" in backbone.type:
        inputs = torch.zeros(BATCH, 1, *[backbone.get("grid", GRID)] * 2, device="cpu")
    else:
        inputs = torch.zeros(BATCH, 3, *[backbone.img_size] * 2, dtype=torch.uint8, device="cpu")
    sample = DataSample()
    with torch.device("cpu"):
        sample.set_gt_label(0)
    sample.set_field([[0] * GRID] * GRID, "token_grid")
    sample.set_field(torch.zeros(GRID, GRID, dtype=torch.int64, device="cpu"), "mask")
    return dict(inputs=inputs, data_samples=[sample.clone() for _ in range(BATCH)])


@pytest.mark.parametrize("path", MICRO, ids=label)
def test_the_losses_of_a_recipe_are_computed_on_the_gpu_and_wait_for_no_value(path: Path):
    """Nor for a copy of anything to the GPU; MMPretrain's preprocessors copy the order of the channels."""
    cfg = load(path)
    with fake_gpu():
        model = build(cfg)
        with torch.device("cpu"), StepCounts() as counts:  # where a training makes new tensors
            counts.phase = "preprocessor"
            data = model.data_preprocessor(batch_of(cfg), training=True)
            counts.phase = "forward"
            loss, _ = model.parse_losses(model(**data, mode="loss"))
    assert (loss.device.type, loss.requires_grad) == ("cuda", True)
    assert counts.waits["forward"] == 0
    if "TokenGrid" in model.data_preprocessor.__class__.__name__:
        assert counts.waits["preprocessor"] <= 1


class Products(TorchDispatchMode):
    """Notes the types in which matrix products and attention are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in PRODUCTS:
            self.dtypes |= {one.dtype for one in args if isinstance(one, torch.Tensor)}
        return function(*args, **(kwargs or {}))

    def attend(self, queries, keys, values, attn_mask=None, **_) -> torch.Tensor:
        """In place of PyTorch's attention, which without a GPU is decomposed, and computes in float32."""
        self.dtypes |= {one.dtype for one in (queries, keys, values, attn_mask) if one is not None}
        return queries + values.mean()


aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution}
PRETRAININGS = [path for path in MICRO if re.match("(mapet|pim|mim|beit)_", path.stem)]


@pytest.fixture
def _autocast_on_cuda():
    """As `torch.autocast("cuda", torch.bfloat16)`, which without a GPU does nothing."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    yield
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cuda", before)
    torch.clear_autocast_cache()


@pytest.mark.usefixtures("_autocast_on_cuda")
@pytest.mark.parametrize("path", PRETRAININGS, ids=label)
def test_every_product_of_a_step_runs_in_bfloat16_on_a_gpu_only_the_loss_in_float32(path, monkeypatch):
    cfg = load(path)
    with fake_gpu(), Products() as products:
        monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", products.attend)
        model = build(cfg)
        data = model.data_preprocessor(batch_of(cfg), training=True)
        loss, _ = model.parse_losses(model(**data, mode="loss"))
    assert products.dtypes == {torch.bfloat16}
    assert loss.dtype is torch.float32
