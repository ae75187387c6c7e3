"""Steps without finite gradients change nothing, are counted, and end the run if they do not stop."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmengine.logging import MessageHub
from mmengine.optim import OptimWrapper, OptimWrapperDict
from torch import nn
from torch.nn.utils import get_total_norm
from trainings import BATCH, HOOKS, build

from mapet_mm.engine.hooks import non_finite_hook
from mapet_mm.engine.hooks.non_finite_hook import NonFiniteError, NonFiniteHook
from mapet_mm.engine.optimizers.autocast_optim_wrapper import AutocastOptimWrapper
from mapet_mm.models import MaPeT
from mapet_mm.registry import MODELS

NAN = float("nan")
BAD: set[str] = set()  # images whose gradients are not finite, by their path


@MODELS.register_module()
class Exploding(MaPeT):
    """MaPeT whose images are not finite where certain ones are in the batch."""

    def loss(self, inputs, data_samples=None):
        bad = torch.tensor([sample.img_path in BAD for sample in data_samples])
        return super().loss([inputs[0].masked_fill(bad[:, None, None, None], NAN), inputs[1]], data_samples)


def run(folder: Path, bad: set[str], patience: int = 20, hooks=(), **optim_wrapper):
    BAD.clear()
    BAD.update(bad)
    hooks = {**HOOKS, "non_finite": dict(type="mapet_mm.NonFiniteHook", patience=patience), **dict(hooks)}
    runner = build(folder, hooks=hooks, optim_wrapper=optim_wrapper)
    runner.model.__class__ = Exploding
    runner.train()
    return runner


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip_grad", [None, dict(max_norm=3.0)])
def test_a_step_with_a_bad_image_changes_neither_weights_nor_moments(fused, clip_grad, tmp_path):
    """Image 3 comes once an epoch: 3 of the 9 steps are left out, the others are taken."""
    options = dict(optimizer=dict(type="AdamW", lr=1e-2, fused=fused), clip_grad=clip_grad)
    runner = run(tmp_path, {"3"}, **options)
    assert runner.message_hub.get_info("steps_left_out") == 3
    parameters = dict(runner.model.named_parameters())
    assert all(value.isfinite().all() for value in parameters.values())
    state = runner.optim_wrapper.optimizer.state
    assert {int(state[value]["step"]) for value in parameters.values()} == {6}


def test_many_bad_steps_in_a_row_end_the_run_with_their_images(tmp_path):
    with pytest.raises(NonFiniteError, match=r"3 steps in a row, up to step 3"):
        run(tmp_path, set(map(str, range(10))), patience=3)
    listed = json.loads((tmp_path / "non_finite_0.json").read_text())
    assert listed["last_step"] == 3
    assert [len(names) for names in listed["images"]] == [BATCH, BATCH, 2]
    assert sorted(int(name) for names in listed["images"] for name in names) == list(range(10))


class Watched:
    """Steps of a model of two weights, one by each optimizer if there are two, under the hook."""

    def __init__(
        self, name: str, dtype: str | None, several: bool = False, fused: bool | None = None, **options
    ) -> None:
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(2)])
        self.hook = NonFiniteHook(interval=1)
        if several:
            adam = [torch.optim.AdamW([value], lr=0.1) for value in self.weights]
            wrapper = OptimWrapperDict(one=OptimWrapper(adam[0]), two=OptimWrapper(adam[1]))
            self.parts = [(wrapper["one"], (0,)), (wrapper["two"], (1,))]
        else:
            adam = torch.optim.AdamW(self.weights, lr=0.1, fused=fused)
            kind = OptimWrapper if dtype is None else AutocastOptimWrapper
            extra = {} if dtype is None else dict(dtype=dtype, loss_scale=4.0)
            wrapper = kind(adam, **extra, **options)
            self.parts = [(wrapper, (0, 1))]
        self.runner = SimpleNamespace(optim_wrapper=wrapper, iter=0, message_hub=MessageHub(name))
        self.hook.before_train(self.runner)

    def step(self, *losses: float) -> list[bool]:
        """True for each weight that changes in a step with these factors of the losses."""
        before, total = [value.detach().clone() for value in self.weights], 0.0
        self.hook.before_train_iter(self.runner, 0, {})
        for one, parts in self.parts:
            with one.optim_context(self.weights):
                loss = sum(losses[part] * self.weights[part].sum() for part in parts)
            one.update_params(loss)
            total += loss.item()
        self.hook.after_train_iter(self.runner, 0, outputs={"loss": torch.tensor(total)})
        self.runner.iter += 1
        return [not torch.equal(one, two) for one, two in zip(before, self.weights, strict=True)]


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_each_wrapper_leaves_bad_steps_out_and_counts_them(dtype, fused, tmp_path):
    """By value: weight decay and moments do not act either. A float16 scaler leaves steps out itself."""
    watched = Watched(tmp_path.name, dtype, fused=fused)
    assert watched.step(1.0, 1.0) == [True, True]
    assert watched.step(1.0, NAN) == [False, False]
    assert watched.step(NAN, 1.0) == [False, False]
    assert watched.hook.in_a_row == 2
    assert watched.step(1.0, 1.0) == [True, True]
    assert watched.hook.in_a_row == 0


def test_of_several_optimizers_each_is_asked(tmp_path):
    watched = Watched(tmp_path.name, None, several=True)
    assert watched.step(NAN, 1.0) == [False, True]
    assert watched.hook.left_out == 1


def test_a_bad_batch_costs_the_step_that_it_is_summed_up_in(tmp_path):
    watched = Watched(tmp_path.name, None, accumulative_counts=2)
    seen = []
    in_a_row = []
    for loss in (1.0, 1.0, NAN, 1.0, 1.0, NAN, 1.0, 1.0):
        seen.append(watched.step(1.0, loss)[0])
        in_a_row.append(watched.hook.in_a_row)
    assert seen == [False, True, False, False, False, False, False, True]
    # A finite batch alone ends no row: the step that it is summed up in may still be bad.
    assert in_a_row == [0, 0, 1, 2, 2, 3, 3, 0]
    assert watched.hook.left_out == 2


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_the_run_ends_at_the_next_look_with_the_same_line_and_images(interval, tmp_path):
    """Six bad steps: the third ends it, whenever the host looks."""
    watched = Watched(tmp_path.name, None, fused=True)
    watched.hook.patience, watched.hook.interval = 3, interval
    watched.runner.work_dir = tmp_path

    def train() -> None:
        for loss in (1.0, *[NAN] * 6):
            watched.step(loss, loss)

    with pytest.raises(NonFiniteError, match="3 steps in a row, up to step 4") as error:
        train()
    assert watched.runner.iter + 1 == interval * -(-4 // interval)
    assert json.loads((tmp_path / "non_finite_0.json").read_text())["last_step"] == 4
    assert "non_finite_0.json" in str(error.value)
    assert all(value.isfinite().all() for value in watched.weights)


def test_nothing_is_read_between_backward_and_the_step_of_a_fused_optimizer(tmp_path, monkeypatch):
    """The norm may not become a number there: it is a tensor that refuses."""

    class Unread(torch.Tensor):
        def __bool__(self) -> bool:
            raise AssertionError("the host reads a value of the device")

        item = tolist = __float__ = __bool__

    monkeypatch.setattr(
        non_finite_hook, "get_total_norm", lambda values: get_total_norm(values).as_subclass(Unread)
    )
    watched = Watched(tmp_path.name, None, fused=True)
    watched.hook.interval = 100
    assert watched.step(1.0, 1.0) == [True, True]
    assert watched.step(NAN, 1.0) == [False, False]
    slow = Watched(tmp_path.name, None)
    with pytest.raises(AssertionError, match="the host reads"):
        slow.step(1.0, 1.0)


def test_no_checkpoint_is_written_with_weights_that_are_not_finite(tmp_path):
    """By a rate that is too high, from finite gradients."""
    options = dict(optimizer=dict(type="AdamW", lr=1e39, fused=True))
    with pytest.raises(NonFiniteError, match="weights that are not finite"):
        run(tmp_path, set(), **options)
    assert not list(tmp_path.glob("*.pth"))
