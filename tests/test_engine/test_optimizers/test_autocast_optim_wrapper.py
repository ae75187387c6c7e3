"""AutocastOptimWrapper: the device's dtype, and clipping, accumulation and resume that stay right."""

import copy

import pytest
import torch
from mmengine.registry import OPTIM_WRAPPERS
from torch import nn

from mapet_mm.engine.optimizers.autocast_optim_wrapper import AutocastOptimWrapper


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    """The tests without a `gpu` mark say what happens on CPU, on whatever machine they run."""
    monkeypatch.setattr("mapet_mm.engine.optimizers.autocast_optim_wrapper.get_device", lambda: "cpu")


def make(model: nn.Module, **kwargs) -> AutocastOptimWrapper:
    optimizer = torch.optim.SGD(model.parameters(), lr=kwargs.pop("lr", 1.0))
    return OPTIM_WRAPPERS.build(dict(type="mapet_mm.AutocastOptimWrapper", optimizer=optimizer, **kwargs))


def linear(weight: float = 1.0) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    return model


def step(wrapper: AutocastOptimWrapper, model: nn.Module, factor: float) -> torch.Tensor:
    with wrapper.optim_context(model):
        output = model(torch.tensor([[factor]]))
    wrapper.update_params(output.sum().float())
    return output


@pytest.mark.parametrize(
    ("seconds", "dtype"), [(0.5, torch.bfloat16), (2, torch.float32)], ids=["fast", "slow"]
)
def test_cpu_computes_in_bfloat16_where_it_is_fast_and_keeps_float32_weights(seconds, dtype, monkeypatch):
    times = {torch.bfloat16: seconds, torch.float32: 1}
    monkeypatch.setattr("mapet_mm.utils.precision.product_seconds", times.__getitem__)
    model = linear()
    wrapper = make(model)
    assert step(wrapper, model, 1.0).dtype is dtype
    assert model.weight.dtype is torch.float32
    assert not wrapper.loss_scaler.is_enabled()


def test_float16_scales_the_loss_and_unscales_the_gradient():
    model = linear()
    wrapper = make(model, dtype="float16", loss_scale=1024.0)
    options = dict(init_scale=1024.0, growth_interval=5)
    assert make(model, dtype="float16", loss_scale=options).loss_scaler.get_growth_interval() == 5
    assert wrapper.loss_scaler.get_scale() == 1024
    assert step(wrapper, model, 0.25).dtype is torch.float16
    assert model.weight.item() == 0.75


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradient_is_clipped_at_its_true_size(dtype):
    """The gradient is 4, clipped to 0.5: with loss scaling a clip of the scaled one would give far less."""
    model = linear()
    step(make(model, dtype=dtype, loss_scale=1024.0, clip_grad=dict(max_norm=0.5)), model, 4.0)
    assert model.weight.item() == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_accumulation_steps_once_with_the_mean_gradient(dtype):
    model = linear()
    wrapper = make(model, dtype=dtype, accumulative_counts=2)
    step(wrapper, model, 0.5)
    assert model.weight.item() == 1.0
    step(wrapper, model, 0.25)
    assert model.weight.item() == pytest.approx(1 - 0.375)
    assert model.weight.grad is None


def test_infinite_gradient_is_left_out_and_lowers_the_scale():
    model = linear()
    wrapper = make(model, dtype="float16")
    step(wrapper, model, float("inf"))
    assert model.weight.item() == 1.0
    assert wrapper.loss_scaler.get_scale() == 65536 / 2


def test_resume_restores_the_loss_scale():
    model = linear()
    wrapper, fresh = make(model, dtype="float16"), make(model, dtype="float16")
    step(wrapper, model, float("inf"))
    state = wrapper.state_dict()
    before = copy.deepcopy(state)
    fresh.load_state_dict(state)
    assert fresh.loss_scaler.get_scale() == 32768
    assert state == before


@pytest.mark.parametrize(("saved", "resumed"), [("bfloat16", "float16"), ("float16", "bfloat16")])
def test_resume_with_the_other_dtype_keeps_the_optimizer_and_starts_the_scaler_afresh(saved, resumed):
    model = linear()
    wrapper = make(model, dtype=resumed)
    wrapper.load_state_dict(make(model, dtype=saved, lr=0.125).state_dict())
    assert wrapper.get_lr()["lr"] == [0.125]
    assert wrapper.loss_scaler.is_enabled() == (resumed == "float16")


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float16)])
def test_cuda_takes_bfloat16_only_where_it_is_native(monkeypatch, native, expected):
    monkeypatch.setattr("mapet_mm.engine.optimizers.autocast_optim_wrapper.get_device", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    assert make(linear()).dtype is expected


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "expected"), [(None, torch.bfloat16), ("float16", torch.float16)])
def test_cuda_trains_in_the_dtype_with_true_clipping(monkeypatch, dtype, expected):
    monkeypatch.setattr("mapet_mm.engine.optimizers.autocast_optim_wrapper.get_device", lambda: "cuda")
    model = linear().cuda()
    wrapper = make(model, dtype=dtype, loss_scale=1024.0, clip_grad=dict(max_norm=0.5))
    with wrapper.optim_context(model):
        output = model(torch.full((1, 1), 4.0, device="cuda"))
    assert output.dtype is expected
    wrapper.update_params(output.sum().float())
    assert model.weight.item() == pytest.approx(0.5, abs=1e-5)
