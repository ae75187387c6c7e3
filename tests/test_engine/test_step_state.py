"""A step that is left out leaves statistics and codebooks as they were, and its rate can be gone back to."""

from types import SimpleNamespace

import pytest
import torch
from mmcv.cnn import Linear
from mmengine.hooks import EMAHook
from mmengine.logging import MessageHub
from mmengine.optim import CosineAnnealingLR, LinearLR, OptimWrapper, OptimWrapperDict
from mmengine.runner import get_priority
from torch import Tensor, nn

from mapet_mm.engine.hooks.non_finite_hook import NonFiniteHook
from mapet_mm.engine.optimizers.autocast_optim_wrapper import AutocastOptimWrapper
from mapet_mm.engine.runners.step_state import ForwardState, ScheduleState

pytestmark = pytest.mark.usefixtures("one_thread")


class Remembering(nn.Module):
    """Each forward pass changes statistics, a codebook and a centre; each of them in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.codebook = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("centre", torch.zeros(3), persistent=False)
        self.register_buffer("cache", None)
        self.frozen = nn.BatchNorm1d(3).requires_grad_(False)

    def train(self, mode: bool = True) -> "Remembering":
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        mean = images.detach().float().mean(0)
        self.codebook.data.mul_(0.9).add_(mean, alpha=0.1)  # as VQ-KD does
        self.centre = 0.9 * self.centre + 0.1 * mean  # a new tensor
        self.cache = images.new_zeros(len(images))  # of this batch's size
        return self.linear(self.norm(self.frozen(images)))

    def state(self) -> dict[str, Tensor]:
        found = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return {name: value.detach().clone() for name, value in found.items() if name != "cache"}


def train(name: str, batches: list[Tensor], kind: str, **options) -> dict[str, Tensor]:
    """What a model holds after steps of these batches under the hook."""
    torch.manual_seed(0)
    model = Remembering().train()
    fused = {"fused": True} if kind in ("fused", "float16") else {}
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.1, **fused)
    if kind == "float16":
        wrapper = AutocastOptimWrapper(optimizer, dtype="float16", loss_scale=4.0, **options)
    else:
        clip = dict(clip_grad=dict(max_norm=1.0)) if kind == "clipped" else {}
        wrapper = OptimWrapper(optimizer, **clip, **options)
    runner = SimpleNamespace(model=model, optim_wrapper=wrapper, param_schedulers=None, iter=0)
    runner.message_hub, hook = MessageHub(name), NonFiniteHook()
    hook.before_train(runner)
    for batch in batches:
        hook.before_train_iter(runner, 0, {})
        with wrapper.optim_context(model):
            loss = model(batch).square().mean()
        wrapper.update_params(loss)
        hook.after_train_iter(runner)
        runner.iter += 1
    assert int(hook.left_out) == sum(not batch.isfinite().all() for batch in batches)
    return model.state()


def test_frozen_weights_below_lora_are_not_copied():
    """No forward pass changes those of linear layers and convolutions, and they may be a whole network."""
    model = Remembering().train().requires_grad_(False)
    names = {name for _, name, _ in ForwardState(model).kept}
    assert names == {
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "num_batches_tracked",
        "codebook",
        "centre",
    }
    assert not any(module is model.linear for module, _, _ in ForwardState(model).kept)
    layers = nn.Sequential(nn.Conv2d(3, 2, 1), Linear(3, 2))
    assert ForwardState(layers.train().requires_grad_(False)).kept == []


class Taught(nn.Module):
    """Each forward pass gives the teacher the network's weights, as CAE's does."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
        self.teacher = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)).requires_grad_(False)


def test_a_teacher_is_put_back_as_a_whole():
    """Not a mixture of its norms of before and its linear layers of now."""
    model = Taught().train()
    kept, state = {name: one.clone() for name, one in model.named_parameters()}, ForwardState(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    state.restore(True)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, kept[name] + (0 if name.startswith("teacher") else 1)), name


KINDS = ("plain", "fused", "clipped", "float16")


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_batch_leaves_statistics_and_codebooks_to_the_bit_as_if_it_had_not_come(kind, tmp_path):
    """Before: a batch norm's running mean was not finite for ever."""
    good, bad = [torch.randn(5, 3) for _ in range(3)], torch.full((4, 3), float("nan"))
    with_bad = train(tmp_path.name, [good[0], bad, good[1], bad, bad, good[2]], kind)
    without = train(tmp_path.name, good, kind)
    assert all(torch.equal(with_bad[name], without[name]) for name in without)
    assert with_bad["norm.num_batches_tracked"] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_of_summed_up_batches_none_is_in_the_statistics_of_a_step_left_out(kind, tmp_path):
    good, bad = [torch.randn(5, 3) for _ in range(5)], torch.full((5, 3), float("nan"))
    with_bad = train(tmp_path.name, [*good[:3], bad, *good[3:]], kind, accumulative_counts=2)
    without = train(tmp_path.name, [*good[:2], *good[3:]], kind, accumulative_counts=2)
    assert all(torch.equal(with_bad[name], without[name]) for name in without)
    assert with_bad["norm.num_batches_tracked"] == 4


def test_only_what_a_forward_pass_may_change_is_kept():
    kept = {name for _, name, _ in ForwardState(Remembering().train()).kept}
    assert kept == {"running_mean", "running_var", "num_batches_tracked", "codebook", "centre"}
    assert ForwardState(Remembering().eval()).kept == []


def test_statistics_are_put_back_before_their_moving_average_is_taken():
    assert get_priority(NonFiniteHook.priority) < get_priority(EMAHook.priority)


def test_rates_schedules_and_the_loss_scale_go_back():
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    adam = [torch.optim.AdamW([one], lr=0.1) for one in weights]
    scaled = AutocastOptimWrapper(adam[0], dtype="float16", loss_scale=dict(init_scale=64.0))
    runner = SimpleNamespace(optim_wrapper=OptimWrapperDict(one=scaled, two=OptimWrapper(adam[1])))
    runner.param_schedulers = dict(
        one=[LinearLR(adam[0], 0.1, end=5)], two=[CosineAnnealingLR(adam[1], T_max=9)]
    )

    def step(factor: float) -> tuple:
        scaled.update_params(factor * weights[0].sum())
        for (schedule,) in runner.param_schedulers.values():
            schedule.step()
        return stand()

    def stand() -> tuple:
        rates = [one.param_groups[0]["lr"] for one in adam]
        steps = [schedule.last_step for (schedule,) in runner.param_schedulers.values()]
        return rates, steps, scaled.loss_scaler.get_scale(), scaled.loss_scaler._get_growth_tracker()

    begun, beginning = stand(), ScheduleState(runner)  # the scaler has no tensor yet
    after, later = step(1.0), ScheduleState(runner)
    assert (after[2], after[3]) == (64.0, 1)
    for _ in range(3):
        step(float("inf"))
    assert stand()[2:] == (8.0, 0)
    later.restore()
    assert stand() == after
    step(1.0)
    beginning.restore()
    assert stand() == begun
