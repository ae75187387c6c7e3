"""Steps without finite gradients change nothing, are counted, and end the run if they do not stop."""

import json
import math
import pickle
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from jittered_training import BATCH, HOOKS, build, final, same
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.optim import AmpOptimWrapper, ApexOptimWrapper, OptimWrapper, OptimWrapperDict
from mmengine.runner import FlexibleRunner
from torch import nn

from mapet_mm.engine.hooks.non_finite_hook import NonFiniteError, NonFiniteHook
from mapet_mm.engine.optimizers.autocast_optim_wrapper import AutocastOptimWrapper
from mapet_mm.models import MaPeT
from mapet_mm.registry import MODELS
from mapet_mm.visualization.training_log import read_scalars

pytestmark = pytest.mark.usefixtures("one_thread")
BAD: dict[str, str] = {}  # what goes wrong with images, by their path


@MODELS.register_module()
class Exploding(MaPeT):
    """MaPeT whose loss, or whose gradients alone, are not finite where certain images are in the batch."""

    def loss(self, inputs, data_samples=None):
        kinds = {BAD.get(sample.img_path) for sample in data_samples}
        if "image" in kinds:
            bad = [BAD.get(sample.img_path) == "image" for sample in data_samples]
            inputs = [inputs[0].masked_fill(torch.tensor(bad)[:, None, None, None], float("nan")), inputs[1]]
        losses = super().loss(inputs, data_samples)
        if "loss" in kinds:
            losses["loss"] = losses["loss"] + float("inf")  # its gradients are finite
        if "gradient" in kinds:
            losses["loss"].register_hook(lambda gradient: gradient * float("nan"))
        return losses


class Rates(Hook):
    """The rate of each step."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}

    def before_train_iter(self, runner, *args, **kwargs) -> None:
        self.rates[runner.iter + 1] = runner.optim_wrapper.param_groups[0]["lr"]


def run(
    folder, resume=False, patience=20, interval=1, load_from=None, watching=(), hooks=(), **optim_wrapper
):
    hooks = {
        **HOOKS,
        "non_finite": dict(type="mapet_mm.NonFiniteHook", patience=patience, interval=interval),
        **dict(hooks),
    }
    runner = build(folder, resume=resume, hooks=hooks, optim_wrapper=optim_wrapper)
    runner.model.__class__ = Exploding
    for hook in watching:
        runner.register_hook(hook)
    if load_from:
        runner._load_from = str(load_from)
    runner.train()
    return runner


@pytest.fixture(autouse=True)
def _nothing_bad():
    BAD.clear()
    yield
    BAD.clear()


def test_the_hooks_leave_nothing_in_a_trained_model(tmp_path):
    """Before: it held optimizer and schedules, which cannot be pickled."""
    model = run(tmp_path / "run", hooks=dict(health=dict(type="mapet_mm.HealthHook"))).model
    copied = pickle.loads(pickle.dumps(model))
    assert same(copied.state_dict(), model.state_dict())
    assert not model._forward_hooks
    assert model.head.statistics is None


class Poison(Hook):
    """From a step on, all images are not finite."""

    def __init__(self, step: int) -> None:
        self.step = step

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        if runner.iter + 1 >= self.step:
            data_batch["inputs"] = data_batch["inputs"] * float("nan")


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


# --- optimizer wrappers ----------------------------------------------------------------------------------


class FakeApex:
    """As Apex does, it looks at the gradients after the backward pass, and if they are not finite it puts a
    function that does nothing in the place of the optimizer's next `step`."""

    @staticmethod
    def initialize(model, optimizer, **_):
        optimizer._amp_stash = SimpleNamespace()
        return model, optimizer

    @staticmethod
    @contextmanager
    def scale_loss(loss, optimizer):
        yield loss
        values = [value for group in optimizer.param_groups for value in group["params"]]
        if not all(value.grad.isfinite().all() for value in values):
            optimizer.step = lambda: vars(optimizer).pop("step")


class Watched:
    """Steps of a model of two weights, one by each optimizer if there are two, under the hook."""

    def __init__(self, name: str, kind: str, monkeypatch, optimizer: dict, **options) -> None:
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(2)])
        self.hook = NonFiniteHook(interval=1)
        adam = [torch.optim.AdamW([value], lr=0.1, **optimizer) for value in self.weights]
        if kind.startswith("several"):
            first = AutocastOptimWrapper(adam[0], dtype=kind.split()[1], loss_scale=4.0)
            wrapper = OptimWrapperDict(one=first, two=OptimWrapper(adam[1]))
            self.parts = [(first, (0,)), (wrapper["two"], (1,))]
        else:
            adam[0].add_param_group(dict(params=[self.weights[1]]))
            scaled = dict(loss_scale=dict(init_scale=4.0, device="cpu"))
            monkeypatch.setattr(
                "mmengine.optim.optimizer.amp_optimizer_wrapper.is_cuda_available", lambda: True
            )
            monkeypatch.setattr("mmengine.optim.optimizer.apex_optimizer_wrapper.apex_amp", FakeApex)
            wrapper = {
                "plain": lambda: OptimWrapper(adam[0], **options),
                "amp": lambda: AmpOptimWrapper(optimizer=adam[0], **scaled, **options),
                "float16": lambda: AutocastOptimWrapper(adam[0], dtype="float16", loss_scale=4.0, **options),
                "apex": lambda: ApexOptimWrapper(optimizer=adam[0], **options),
            }[kind]()
            self.parts = [(wrapper, (0, 1))]
        self.runner = SimpleNamespace(
            model=self.weights, optim_wrapper=wrapper, param_schedulers=None, iter=0
        )
        self.runner.message_hub = MessageHub(name)
        self.hook.before_train(self.runner)

    def step(self, *losses: float | None) -> list[bool]:
        """Whether each weight changes in a step with these factors of the losses, or without a loss."""
        before = [value.detach().clone() for value in self.weights]
        self.hook.before_train_iter(self.runner, 0, {})
        for one, parts in self.parts:
            if losses[parts[0]] is not None:
                with one.optim_context(self.weights):
                    loss = sum(losses[part] * self.weights[part].sum() for part in parts)
                one.update_params(loss)
        self.hook.after_train_iter(self.runner)
        self.runner.iter += 1
        return [not torch.equal(one, two) for one, two in zip(before, self.weights, strict=True)]

    @property
    def counted(self) -> tuple[int, int]:
        return int(self.hook.left_out), int(self.hook.in_a_row)


NAN = float("nan")


@pytest.mark.parametrize("clip_grad", [None, dict(max_norm=1.0), dict(type="value", clip_value=1.0)])
@pytest.mark.parametrize("way", ["default", "fused", "foreach"])
@pytest.mark.parametrize("kind", ["plain", "amp", "float16", "apex"])
def test_each_wrapper_leaves_bad_steps_out_and_counts_them_once(kind, way, clip_grad, tmp_path, monkeypatch):
    """By value: weight decay and moments do not act either."""
    clip_grad = clip_grad and dict(clip_grad)  # the wrapper changes it
    optimizer = {} if way == "default" else {way: True}
    watched = Watched(tmp_path.name, kind, monkeypatch, optimizer, clip_grad=clip_grad)
    assert watched.step(1.0, 1.0) == [True, True]
    assert watched.step(1.0, NAN) == [False, False]
    assert watched.step(NAN, 1.0) == [False, False]
    assert watched.counted == (2, 2)
    assert watched.step(1.0, 1.0) == [True, True]
    assert watched.counted == (2, 0)


@pytest.mark.parametrize("kind", ["plain", "amp", "float16", "apex"])
def test_a_bad_batch_costs_the_step_that_it_is_summed_up_in(kind, tmp_path, monkeypatch):
    watched = Watched(tmp_path.name, kind, monkeypatch, {}, accumulative_counts=2)
    seen = [watched.step(1.0, loss)[0] for loss in (1.0, 1.0, NAN, 1.0, 1.0, NAN, 1.0, 1.0)]
    assert seen == [False, True, False, False, False, False, False, True]
    assert watched.counted == (2, 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_of_several_optimizers_each_is_asked_and_a_step_counts_once(dtype, tmp_path, monkeypatch):
    """A float16 optimizer's scaler decides; an optimizer may have no turn in a step."""
    watched = Watched(tmp_path.name, f"several {dtype}", monkeypatch, {})
    assert watched.step(1.0, 1.0) == [True, True]
    assert watched.step(NAN, 1.0) == [False, True]
    assert watched.counted == (1, 1)
    assert watched.step(1.0, NAN) == [True, False]
    assert watched.step(NAN, NAN) == [False, False]
    assert watched.counted == (3, 3)
    assert watched.step(None, 1.0) == [False, True]
    assert watched.counted == (3, 0)


def test_an_optimizer_of_another_library_is_said_not_to_be_watched(tmp_path, capture_log):
    foreign = SimpleNamespace(optimizer=SimpleNamespace())
    NonFiniteHook().before_train(SimpleNamespace(model=nn.Linear(1, 1), optim_wrapper=foreign))
    assert "SimpleNamespace is no optimizer of PyTorch and is not watched" in capture_log()


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


def test_a_bad_image_is_neither_in_the_figures_of_health_nor_an_end_of_the_run(tmp_path):
    """Before: the rank of latents that are not finite ended the run with LAPACK's error."""
    BAD["3"] = "image"
    hooks = dict(health=dict(type="mapet_mm.HealthHook", interval=1), runtime=dict(type="RuntimeInfoHook"))
    runner = run(tmp_path / "run", hooks=hooks)
    assert runner.message_hub.get_info("steps_left_out") == 3
    records = [one for one in read_scalars(tmp_path / "run") if "latent_rank" in one]
    assert [one["step"] for one in records] == list(range(1, 10))
    assert all(math.isfinite(value) for one in records for value in one.values())
    BAD.update({str(index): "image" for index in range(10)})
    with pytest.raises(NonFiniteError, match="3 steps in a row, from step 1 on"):
        run(tmp_path / "bad", patience=3, hooks=hooks)
    assert {"non_finite.pth", "non_finite.json"} <= {path.name for path in (tmp_path / "bad").iterdir()}


@pytest.mark.parametrize("wrapper", ["fused", "clipped"])
def test_the_state_of_a_run_that_ends_does_the_steps_again_at_their_rates(wrapper, tmp_path):
    """Before: the schedule was ahead by the steps that were left out."""
    undisturbed, again, state = Rates(), Rates(), tmp_path / "bad/non_finite.pth"
    run(tmp_path / "undisturbed", watching=[undisturbed], **WRAPPERS[wrapper])
    with pytest.raises(NonFiniteError, match="steps in a row, from step 5 on"):
        run(tmp_path / "bad", patience=3, interval=3, watching=[Poison(5)], **WRAPPERS[wrapper])
    run(tmp_path / "again", resume=True, load_from=state, watching=[again], **WRAPPERS[wrapper])
    assert same(final(tmp_path / "again"), final(tmp_path / "undisturbed"))
    assert len(set(undisturbed.rates.values())) == 9
    assert again.rates == {step: rate for step, rate in undisturbed.rates.items() if step >= 5}


def test_a_runner_with_a_strategy_also_goes_on_with_the_first_of_the_steps(tmp_path, monkeypatch):
    """MMEngine's saves where it stands, whatever it is told."""
    make = lambda cfg, launcher, randomness, **rest: FlexibleRunner(  # noqa: E731
        **rest, strategy=dict(type="SingleDeviceStrategy"), cfg=dict(randomness=randomness)
    )
    monkeypatch.setattr("jittered_training.Runner", make)
    hooks = {**HOOKS, "non_finite": dict(type="mapet_mm.NonFiniteHook", patience=3, interval=1)}
    runner = build(tmp_path / "run", hooks=hooks)
    runner.register_hook(Poison(5))
    with pytest.raises(NonFiniteError, match="3 steps in a row, from step 5 on"):
        runner.train()
    meta = torch.load(tmp_path / "run/non_finite.pth", weights_only=True)["meta"]
    assert (meta["iter"], meta["epoch"]) == (4, 1)


def test_of_several_processes_one_writes_the_images_and_all_end(tmp_path, monkeypatch):
    monkeypatch.setattr("mapet_mm.engine.hooks.non_finite_hook.is_main_process", lambda: False)
    BAD["3"] = "loss"
    with pytest.raises(NonFiniteError, match="`3`"):
        run(tmp_path / "run", patience=1)
    assert not (tmp_path / "run/non_finite.json").exists()


def test_accumulated_batches_count_together(tmp_path):
    """Four batches make a step; images of all of them are looked at."""
    BAD["3"] = "loss"
    with pytest.raises(NonFiniteError) as raised:
        run(tmp_path / "run", patience=1, accumulative_counts=4)
    assert "from step 1 on" in str(raised.value)
    assert "3" in json.loads((tmp_path / "run/non_finite.json").read_text())["images"]


def test_the_first_of_accumulated_batches_is_found_from_within_the_next_step(tmp_path):
    """The look after the third batch finds that the first two were left out."""
    BAD.update({str(index): "gradient" for index in range(10)})
    with pytest.raises(NonFiniteError, match="1 steps in a row, from step 1 on"):
        run(tmp_path / "run", patience=1, interval=3, accumulative_counts=2, **WRAPPERS["fused"])


def test_patience_below_one_is_refused():
    with pytest.raises(ValueError, match="patience=0 and interval=10 must be 1 or more"):
        NonFiniteHook(patience=0)
