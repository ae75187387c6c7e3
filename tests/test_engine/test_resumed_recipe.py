"""A resumed training has the rates, decays and schedules of its recipe, and the checkpoint's moments."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmengine.hooks import ParamSchedulerHook
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import PARAM_SCHEDULERS
from mmengine.runner import EpochBasedTrainLoop
from tiny_training import read_checkpoint, read_scalars, second_of_its_own
from torch import nn
from torch.utils.data import DataLoader

from mapet_mm.engine.hooks.epoch_seed_hook import ResumeError
from mapet_mm.engine.hooks.resumed_recipe_hook import ResumedRecipeHook
from mapet_mm.engine.optimizers.layer_decay import LayerDecayOptimWrapperConstructor
from mapet_mm.engine.runners.build_runner import build_runner
from mapet_mm.engine.runners.launch import configure_training, load_config

pytestmark = pytest.mark.usefixtures("one_thread")
EPOCHS, LENGTH = 6, 4
WARM_UP = dict(type="LinearLR", start_factor=0.01, begin=0, end=2)
COSINE = dict(type="CosineAnnealingLR", eta_min=1e-5, begin=2, end=EPOCHS)
CONVERTED = dict(by_epoch=True, convert_to_iter_based=True)
RECIPE = dict(
    length=LENGTH,
    lr=1e-2,
    weight_decay=0.05,
    betas=(0.9, 0.98),
    decay_rate=0.5,
    schedule=[dict(WARM_UP, **CONVERTED), dict(COSINE, **CONVERTED)],
)


class Model(nn.Module):
    """Two layers at depths 0 and 1 and a head, which is at the top."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
        self.backbone.get_layer_depth = lambda name, prefix: (int(name.split(".")[1] == "2"), 2)
        self.head = nn.Linear(3, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(images))


def run_of(recipe: dict, resume: bool = True) -> SimpleNamespace:
    """What a hook sees of a run that has built its model, optimizer and schedules."""
    torch.manual_seed(0)
    optimizer = dict(
        type=recipe.get("optimizer", "AdamW"), lr=recipe["lr"], weight_decay=recipe["weight_decay"]
    )
    if optimizer["type"] != "SGD":
        optimizer["betas"] = recipe["betas"]
    model, layer_decay = Model(), dict(layer_decay_rate=recipe["decay_rate"])
    wrapper = LayerDecayOptimWrapperConstructor(dict(optimizer=optimizer), layer_decay)(model)
    schedulers = [
        PARAM_SCHEDULERS.build(
            copy.deepcopy(one), default_args=dict(optimizer=wrapper, epoch_length=recipe["length"])
        )
        for one in recipe["schedule"]
    ]
    return SimpleNamespace(
        model=model,
        optim_wrapper=wrapper,
        param_schedulers=schedulers,
        train_dataloader=DataLoader(range(recipe["length"])),
        train_loop=EpochBasedTrainLoop.__new__(EpochBasedTrainLoop),
        cfg={},
        _resume=resume,
        _load_from="epoch_N.pth",
    )


def train(run: SimpleNamespace, begin: int, end: int) -> list[list[tuple]]:
    """Train from a step to another, with MMEngine's own hook; rates, decays and betas of each step."""
    hook, used, length = ParamSchedulerHook(), [], len(run.train_dataloader)
    for step in range(begin, end):
        groups = run.optim_wrapper.param_groups  # also MMEngine's for the log
        used.append([(group["lr"], group["weight_decay"], group.get("betas")) for group in groups])
        run.optim_wrapper.update_params(run.model(torch.ones(2, 3)).square().mean())
        hook.after_train_iter(run, step)
        if (step + 1) % length == 0:
            hook.after_train_epoch(run)
    return used


def checkpoint_of(run: SimpleNamespace, steps: int) -> dict:
    checkpoint = dict(
        meta=dict(iter=steps, epoch=steps // len(run.train_dataloader)),
        optimizer=run.optim_wrapper.state_dict(),
        param_schedulers=[scheduler.state_dict() for scheduler in run.param_schedulers],
    )
    ResumedRecipeHook().before_save_checkpoint(run, checkpoint)
    return copy.deepcopy(checkpoint)


def resume(run: SimpleNamespace, checkpoint: dict) -> None:
    """As MMEngine does."""
    ResumedRecipeHook().after_load_checkpoint(run, checkpoint)
    if "optimizer" in checkpoint:
        run.optim_wrapper.load_state_dict(checkpoint["optimizer"])
    for scheduler, state in zip(run.param_schedulers, checkpoint["param_schedulers"], strict=True):
        scheduler.load_state_dict(state)


def moments(run: SimpleNamespace) -> dict[str, torch.Tensor]:
    state = run.optim_wrapper.optimizer.state
    return {name: state[value]["exp_avg"].clone() for name, value in run.model.named_parameters()}


BY_EPOCH = [WARM_UP, COSINE]
MOMENTUM = dict(type="CosineAnnealingMomentum", eta_min=0.5, begin=0, end=EPOCHS, **CONVERTED)
ONE_CYCLE = [dict(type="OneCycleLR", eta_max=0.1, total_steps=EPOCHS * LENGTH, by_epoch=False)]
LONGER = [dict(WARM_UP, end=1, **CONVERTED), dict(COSINE, begin=1, end=9, **CONVERTED)]
CHANGES = {
    "lower rate": dict(lr=1e-5),
    "rate of schedules by epoch": dict(lr=1e-3, schedule=BY_EPOCH),
    "longer": dict(schedule=LONGER),
    "warm-up by step, then by epoch": dict(schedule=[dict(WARM_UP, end=8, by_epoch=False), COSINE]),
    "both at the same time": dict(
        schedule=[dict(WARM_UP, end=EPOCHS), dict(COSINE, begin=0, by_epoch=False)]
    ),
    "no schedule": dict(schedule=[]),
    "momentum": dict(schedule=[*RECIPE["schedule"], MOMENTUM]),
    "one cycle": dict(schedule=ONE_CYCLE),
    "milestones": dict(schedule=[dict(type="MultiStepLR", milestones=[1, 4], **CONVERTED)]),
    "weight decay": dict(weight_decay=0.3),
    "no weight decay, which leaves fewer groups": dict(weight_decay=0.0),
    "betas": dict(betas=(0.8, 0.9)),
    "layer decay": dict(decay_rate=0.9),
    "half the processes": dict(lr=5e-3, length=2 * LENGTH),
    "twice the processes, at the same rate": dict(length=LENGTH // 2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("epochs", [1, 3, 5])
def test_rates_are_those_of_an_undisturbed_run_of_the_recipe_to_the_bit(change, epochs):
    expect_the_rates_of_an_undisturbed_run(RECIPE, {**RECIPE, **change}, epochs)


def test_schedules_counted_in_steps_stand_at_the_steps_of_now():
    by_step = {**RECIPE, "schedule": [dict(COSINE, begin=0, end=99, by_epoch=False)]}
    expect_the_rates_of_an_undisturbed_run(by_step, {**by_step, "length": 2 * LENGTH}, 3)


def expect_the_rates_of_an_undisturbed_run(before: dict, now: dict, epochs: int) -> None:
    """To the bit, from the checkpoint on, with the checkpoint's moments."""
    length = now["length"]
    undisturbed = train(run_of(now), 0, EPOCHS * length)
    stopped, resumed = run_of(before), run_of(now)
    train(stopped, 0, epochs * LENGTH)
    resume(resumed, checkpoint_of(stopped, epochs * LENGTH))
    after = moments(resumed)
    assert all(torch.equal(after[name], value) for name, value in moments(stopped).items())
    assert train(resumed, epochs * length, EPOCHS * length) == undisturbed[epochs * length :]


SCHEDULES = {
    "converted": RECIPE["schedule"],
    "epochs": BY_EPOCH,
    "both": CHANGES["both at the same time"]["schedule"],
    "momentum": [MOMENTUM],
    "momentum by epoch": [dict(MOMENTUM, convert_to_iter_based=False), *BY_EPOCH],
    "one cycle": ONE_CYCLE,
    "by validations": [dict(type="ReduceOnPlateauLR", monitor="loss")],
    "none": [],
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("steps", [0, 5, 8, 24])
def test_a_checkpoint_of_the_same_recipe_is_left_as_it_is(schedule, steps):
    recipe = {**RECIPE, "schedule": schedule}
    stopped = run_of(recipe)
    train(stopped, 0, steps)
    checkpoint = checkpoint_of(stopped, steps)
    parts = [id(checkpoint[name]) for name in ("optimizer", "param_schedulers")]
    groups, states = checkpoint["optimizer"]["param_groups"], copy.deepcopy(checkpoint["param_schedulers"])
    ResumedRecipeHook().after_load_checkpoint(run_of(recipe), checkpoint)
    assert [id(checkpoint[name]) for name in ("optimizer", "param_schedulers")] == parts
    assert checkpoint["optimizer"]["param_groups"] is groups
    assert checkpoint["param_schedulers"] == states


def test_a_longer_training_with_a_schedule_by_validations_goes_on():
    """MMEngine makes the training's length the schedule's end, which says nothing of where it stands."""
    shorter, longer = ([dict(type="ReduceOnPlateauLR", monitor="loss", end=end)] for end in (2, 6))
    checkpoint = checkpoint_of(run_of(RECIPE | dict(schedule=shorter), resume=False), 0)
    run = run_of(RECIPE | dict(schedule=longer))
    resume(run, checkpoint)
    assert run.param_schedulers[0].end == 6


@pytest.mark.parametrize("schedule", [RECIPE["schedule"], BY_EPOCH], ids=["by step", "by epoch"])
def test_without_an_optimizer_in_the_checkpoint_the_rates_are_those_of_its_place(schedule, capture_log):
    """Before, with `save_optimizer=False`: the first step's rate, and its schedule's steps from there."""
    recipe = {**RECIPE, "schedule": schedule}
    undisturbed = train(run_of(recipe), 0, EPOCHS * LENGTH)
    stopped, resumed = run_of(recipe), run_of(recipe)
    train(stopped, 0, 3 * LENGTH)
    checkpoint = checkpoint_of(stopped, 3 * LENGTH)
    del checkpoint["optimizer"]
    resume(resumed, checkpoint)
    assert train(resumed, 3 * LENGTH, EPOCHS * LENGTH) == undisturbed[3 * LENGTH :]
    assert "in moments (the checkpoint has none, by `save_optimizer`, so that they begin" in capture_log()


def test_a_checkpoint_that_brings_its_weights_alone_is_left_as_it_is():
    checkpoint = dict(meta={}, optimizer="untouched")
    ResumedRecipeHook().after_load_checkpoint(run_of(RECIPE, resume=False), checkpoint)
    assert checkpoint["optimizer"] == "untouched"


def test_what_has_changed_is_said_with_the_rates_that_are_used(capture_log):
    stopped = run_of(RECIPE)
    train(stopped, 0, 8)
    resume(run_of({**RECIPE, "lr": 1e-4, "schedule": LONGER}), checkpoint_of(stopped, 8))
    *_, line = capture_log().strip().splitlines()
    assert line.endswith(
        "this run differs from the checkpoint's training in lr, schedule, and goes on as if it had begun "
        "so: learning rates 4.85e-05 to 9.66e-05 after epoch 2 and step 8"
    )


ALONE = "take its weights alone (`load_from`, with another --work-dir and without --resume)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(optimizer="SGD"),
            "`optim_wrapper.optimizer`: SGD needs dampening, momentum, which the optimizer of epoch_N.pth "
            f"does not have: its moments are another type's. Set the type back, or {ALONE}",
        ),
        (
            dict(lr=1e-3, schedule=[dict(type="ReduceOnPlateauLR", monitor="loss")]),
            "the recipe has changed since the checkpoint, and where its schedule by validations "
            f"(`param_scheduler`) would stand is not known: set the recipe back, or {ALONE}",
        ),
    ],
)
def test_what_cannot_go_on_is_one_line(change, message):
    stopped = run_of(RECIPE)
    train(stopped, 0, 4)
    with pytest.raises(ResumeError) as error:
        resume(run_of({**RECIPE, **change}), checkpoint_of(stopped, 4))
    assert str(error.value) == message


@pytest.mark.parametrize("named", [True, False])
def test_other_parameters_are_refused(named):
    stopped, other = run_of(RECIPE), run_of({**RECIPE, "lr": 1e-3})
    train(stopped, 0, 4)
    checkpoint = checkpoint_of(stopped, 4)
    group = checkpoint["optimizer"]["param_groups"][0]
    group.update(names=["head.scale", *group["names"][1:]])
    if not named:
        group.pop("names")
        group["params"] = group["params"][1:]
    with pytest.raises(ResumeError) as error:
        resume(other, checkpoint)
    assert str(error.value) == (
        "the optimizer of epoch_N.pth has other parameters, or groups them otherwise, than this recipe's "
        f"model and `optim_wrapper`: set them back, or {ALONE}"
    )


def test_each_of_several_optimizers_takes_its_own_rates():
    def build(rate: float) -> SimpleNamespace:
        run = run_of(RECIPE)
        wrappers = {
            name: OptimWrapper(torch.optim.SGD(part.parameters(), lr=scale * rate))
            for name, part, scale in (("one", run.model.backbone, 1), ("two", run.model.head, 2))
        }
        run.param_schedulers = {
            name: [PARAM_SCHEDULERS.build(dict(type="ExponentialLR", gamma=0.5, optimizer=wrapper))]
            for name, wrapper in wrappers.items()
        }
        run.optim_wrapper = OptimWrapperDict(**wrappers)
        return run

    stopped, resumed = build(0.1), build(0.2)
    schedules = {name: [one.state_dict() for one in part] for name, part in stopped.param_schedulers.items()}
    checkpoint = dict(
        meta=dict(iter=8, epoch=2), optimizer=stopped.optim_wrapper.state_dict(), param_schedulers=schedules
    )
    checkpoint["optimizer"]["three"] = {}
    ResumedRecipeHook().after_load_checkpoint(resumed, checkpoint)
    with pytest.raises(AssertionError, match="cannot found three"):  # MMEngine's, of one that the run lacks
        resumed.optim_wrapper.load_state_dict(checkpoint["optimizer"])
    rates = [checkpoint["optimizer"][name]["param_groups"][0]["lr"] for name in ("one", "two")]
    assert rates == [0.2 / 4, 0.4 / 4]
    assert [part[0]["_global_step"] for part in checkpoint["param_schedulers"].values()] == [2, 2]


# --- by the tools ----------------------------------------------------------------------------------------


COSINE_BY_STEP = [dict(type="CosineAnnealingLR", by_epoch=True, end=2, convert_to_iter_based=True)]
FLEXIBLE = dict(runner_type="FlexibleRunner", env_cfg=dict())


def train_tiny(config: Path, work: Path, options: dict, resume: Path | None = None) -> None:
    """Two epochs of eight images with `--auto-scale-lr`; the rate is meant for a batch of 4."""
    options = {"param_scheduler": COSINE_BY_STEP, "auto_scale_lr.base_batch_size": 4, **options}
    cfg = load_config(str(config), options, str(work))
    cfg.default_hooks.epoch_seed = dict(type="mapet_mm.EpochSeedHook")
    configure_training(cfg, resume and str(resume), no_validate=True, auto_scale_lr=True)
    with second_of_its_own():
        build_runner(cfg, "none").train()


@pytest.mark.parametrize("runner", [{}, FLEXIBLE], ids=["", "flexible"])
def test_the_same_command_with_half_the_images_a_step_has_half_the_rate(config, tmp_path, runner):
    """As with half the processes: four steps an epoch and not two, whose cosine ends with the training."""
    train_tiny(config, tmp_path / "four", {"train_dataloader.batch_size": 4, "train_cfg.max_epochs": 1})
    train_tiny(config, tmp_path / "two", runner, tmp_path / "four/epoch_1.pth")
    train_tiny(config, tmp_path / "alone", runner)
    rates, undisturbed = ([line["lr"] for line in read_scalars(tmp_path / name)] for name in ("two", "alone"))
    assert rates == undisturbed[4:]
    assert rates[0] == pytest.approx(0.01 / 8 * 0.5 * 0.5)  # deepest layer, half the images, half the cosine
    assert read_checkpoint(tmp_path / "two", 2)["meta"]["iter"] == 8


@pytest.mark.parametrize("runner", [{}, FLEXIBLE], ids=["", "flexible"])
def test_another_seed_counts_from_the_checkpoint_on(config, tmp_path, runner):
    """Before: the checkpoint's seed went on, and the images came in its order."""
    first = tmp_path / "first/epoch_1.pth"
    train_tiny(config, first.parent, {"train_cfg.max_epochs": 1, **runner})
    for seed in (0, 5):
        train_tiny(config, tmp_path / str(seed), {"randomness.seed": seed, **runner}, first)
    same, other = (read_checkpoint(tmp_path / seed, 2) for seed in "05")
    assert (same["meta"]["seed"], other["meta"]["seed"]) == (0, 5)
    assert not torch.equal(same["state_dict"]["head.fc.weight"], other["state_dict"]["head.fc.weight"])
