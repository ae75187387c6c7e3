"""Steps without finite gradients change nothing, are counted, and end the run if they do not stop."""

import json

import pytest
import torch
from jittered_training import BATCH, HOOKS, build, same
from mmengine.optim import OptimWrapper
from torch import nn

from mapet_mm.engine.non_finite import NonFiniteError, NonFiniteHook
from mapet_mm.models import MaPeT
from mapet_mm.registry import MODELS

pytestmark = pytest.mark.usefixtures("one_thread")
BAD: dict[str, str] = {}  # what goes wrong with images, by their path


@MODELS.register_module()
class Exploding(MaPeT):
    """MaPeT whose loss, or whose gradients alone, are not finite where certain images are in the batch."""

    def loss(self, inputs, data_samples=None):
        losses = super().loss(inputs, data_samples)
        kinds = {BAD.get(sample.img_path) for sample in data_samples}
        if "loss" in kinds:
            losses["loss"] = losses["loss"] + float("inf")  # its gradients are finite
        if "gradient" in kinds:
            losses["loss"].register_hook(lambda gradient: gradient * float("nan"))
        return losses


def run(folder, resume=False, patience=20, load_from=None, **optim_wrapper):
    hooks = {**HOOKS, "non_finite": dict(type="mapet_mm.NonFiniteHook", patience=patience, interval=1)}
    runner = build(folder, resume=resume, hooks=hooks, optim_wrapper=optim_wrapper)
    runner.model.__class__ = Exploding
    if load_from:
        runner._load_from = str(load_from)
    runner.train()
    return runner


@pytest.fixture(autouse=True)
def _nothing_bad():
    BAD.clear()
    yield
    BAD.clear()


WRAPPERS = {
    "plain": dict(optimizer=dict(type="AdamW", lr=1e-2)),
    "fused": dict(optimizer=dict(type="AdamW", lr=1e-2, fused=True)),
    "clipped": dict(clip_grad=dict(max_norm=3.0)),
    "autocast": dict(type="mapet_mm.AutocastOptimWrapper", optimizer=dict(type="AdamW", lr=1e-2, fused=True)),
    "SGD": dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=0.1)),
}


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize(
    "wrapper",
    [
        "fused",
        "clipped",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("plain", "autocast", "SGD")),
    ],
)
def test_a_step_with_a_bad_image_changes_neither_weights_nor_moments(wrapper, kind, tmp_path, capture_log):
    """Image 3 comes once an epoch: 3 of the 9 steps are left out, the others are taken."""
    BAD["3"] = kind
    runner = run(tmp_path / "run", **WRAPPERS[wrapper])
    assert runner.message_hub.get_info("steps_left_out") == 3
    parameters = dict(runner.model.named_parameters())
    assert all(value.isfinite().all() for value in parameters.values())
    state = runner.optim_wrapper.optimizer.state
    if wrapper != "SGD":
        assert {int(state[value]["step"]) for value in parameters.values()} == {6}


def test_an_optimizer_that_is_not_asked_takes_no_step():
    """By value: weight decay and momentum do not act either."""
    for options in (dict(fused=True), dict(fused=False), dict(foreach=True)):
        linear = nn.Linear(3, 2)
        wrapper = OptimWrapper(torch.optim.AdamW(linear.parameters(), lr=0.1, weight_decay=0.5, **options))
        hook = NonFiniteHook()
        wrapper.optimizer.register_step_pre_hook(lambda one, *_, h=hook, w=wrapper: h._look(w, one))
        wrapper.update_params(linear(torch.ones(1, 3)).sum())
        before = [value.clone() for value in linear.parameters()]
        wrapper.update_params(linear(torch.full((1, 3), float("nan"))).sum())
        assert all(torch.equal(one, two) for one, two in zip(before, linear.parameters(), strict=True))
        assert (int(hook.left_out), int(hook.in_a_row)) == (1, 1)
        wrapper.update_params(linear(torch.ones(1, 3)).sum())
        assert not any(torch.equal(one, two) for one, two in zip(before, linear.parameters(), strict=True))
        assert (int(hook.left_out), int(hook.in_a_row)) == (1, 0)


def test_the_hook_alone_changes_no_bit(tmp_path):
    watched = run(tmp_path / "watched")
    plain = build(tmp_path / "plain")
    plain.train()
    assert same(watched.model.state_dict(), plain.model.state_dict())


def test_a_run_of_bad_steps_ends_the_job_with_its_images_and_a_state_that_does_it_again(tmp_path):
    BAD.update({str(index): "loss" for index in range(10)})
    with pytest.raises(NonFiniteError, match=r"3 steps in a row, from step 1 on.*--resume .*non_finite.pth"):
        run(tmp_path / "run", patience=3)
    BAD.clear()
    BAD.update({"3": "loss"})
    folder = tmp_path / "run"
    with pytest.raises(NonFiniteError, match=r"1 steps in a row, from step (\d+) on.*`3`") as raised:
        run(folder / "again", patience=1)
    listed = json.loads((folder / "again/non_finite.json").read_text())
    assert "3" in listed["images"]
    assert len(listed["images"]) <= BATCH
    assert "\n" not in str(raised.value)
    state = folder / "again/non_finite.pth"
    with pytest.raises(NonFiniteError) as second:
        run(folder / "state", resume=True, patience=1, load_from=state)
    again = json.loads((folder / "state/non_finite.json").read_text())
    assert again == listed
    assert f"from step {listed['step']} on" in str(second.value)


def test_accumulated_batches_count_together(tmp_path):
    """Four batches make a step; images of all of them are looked at."""
    BAD["3"] = "loss"
    with pytest.raises(NonFiniteError) as raised:
        run(tmp_path / "run", patience=1, accumulative_counts=4)
    assert "from step 1 on" in str(raised.value)
    assert "3" in json.loads((tmp_path / "run/non_finite.json").read_text())["images"]


def test_patience_below_one_is_refused():
    with pytest.raises(ValueError, match="patience=0 and interval=10 must be 1 or more"):
        NonFiniteHook(patience=0)
