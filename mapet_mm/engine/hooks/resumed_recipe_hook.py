"""A resumed training follows the recipe as it is now; its checkpoint says where it stands."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.optim import OptimWrapper, OptimWrapperDict, _ParamScheduler
from mmengine.runner import Runner
from torch.optim import Optimizer

from mapet_mm.engine.hooks.epoch_seed_hook import ResumeError, count_in_epochs, note_epoch_length
from mapet_mm.registry import HOOKS

# What a scheduler counts and measures, beside its settings; its base values are the groups' first ones.
COUNTED = {"last_step", "_global_step", "_last_value", "base_values", "verbose"}
COUNTED |= {"best", "cooldown_counter", "num_bad_epochs"}
GROUPS = "parameter groups"
WEIGHTS_ALONE = "take its weights alone (`load_from`, with another --work-dir and without --resume)"


class Position(NamedTuple):
    """Where a checkpoint stands: steps and epochs that are done, steps of an epoch."""

    steps: int
    epochs: int
    length: int

    def of(self, scheduler: _ParamScheduler) -> int:
        """How often a scheduler has been stepped."""
        return self.epochs if scheduler.by_epoch else self.steps


class Part(NamedTuple):
    """An optimizer wrapper and its schedules, as the recipe has them, and the checkpoint's states of both."""

    wrapper: OptimWrapper
    state: dict
    schedulers: Sequence[_ParamScheduler]
    saved: Sequence[dict]


@HOOKS.register_module()
class ResumedRecipeHook(Hook):
    """Resume with rate, weight decay, momentum, schedule and seed of the recipe, not with the checkpoint's.

    MMEngine resumes with all hyper-parameters and schedules of the checkpoint, whatever the recipe says, and
    whatever `auto_scale_lr` makes of another number of processes. With this hook, they are from the
    checkpoint on what a run that had this recipe from the start would have there. The moments of the
    optimizer and the position (epochs, and steps counted by the present length of an epoch) are the
    checkpoint's; without them (`save_optimizer=False`) they begin anew. What is drawn from there on is drawn
    with the recipe's seed, if it has one. If nothing has changed, the checkpoint is used as it is.

    tools/train.py adds it. With MMEngine's strategies it acts on checkpoints that hold the optimizer beside
    the weights; DeepSpeed's do not.

    Raises:
        ResumeError: the moments fit another type of optimizer or other parameters, or a schedule that has
            changed follows validations that are not known any more.
    """

    priority = "LOWEST"  # after hooks that change the position

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Note the number of steps of an epoch."""
        note_epoch_length(runner, checkpoint)

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Put the recipe's hyper-parameters and schedules into the checkpoint, before MMEngine takes them."""
        if not runner._resume:
            return
        _take_over_seed(runner, checkpoint)
        without = "optimizer" not in checkpoint
        # MMEngine's strategies have the optimizer's state in forms of their own.
        if not isinstance(runner.optim_wrapper, OptimWrapper) or (without and hasattr(runner, "strategy")):
            return
        changed: set[str] = set()
        if without:
            changed.add("moments (the checkpoint has none, by `save_optimizer`, so that they begin anew)")
            checkpoint["optimizer"] = runner.optim_wrapper.state_dict()
        count_in_epochs(runner, checkpoint)
        meta = checkpoint["meta"]
        position = Position(meta["iter"], meta["epoch"], len(runner.train_dataloader))
        parts = _parts(runner, checkpoint)
        for part in parts.values():
            _check_optimizer(part.wrapper.optimizer, part.state, runner._load_from)
            changed |= _group_changes(part.wrapper.optimizer, part.state)
            _take_over_ends(part.schedulers, part.saved)
            changed |= _schedule_changes(part.schedulers, part.saved, position)
        if not changed:
            return
        for part in parts.values():
            _replay(part.schedulers, position)
        states = {name: _with_groups(part, runner._load_from) for name, part in parts.items()}
        schedules = {name: [one.state_dict() for one in part.schedulers] for name, part in parts.items()}
        single = None in parts
        checkpoint["optimizer"] = states[None] if single else {**checkpoint["optimizer"], **states}
        checkpoint["param_schedulers"] = schedules[None] if single else schedules
        rates = [group["lr"] for part in parts.values() for group in part.wrapper.optimizer.param_groups]
        print_log(
            f"this run differs from the checkpoint's training in {', '.join(sorted(changed))}, and goes on "
            f"as if it had begun so: learning rates {min(rates):.3g} to {max(rates):.3g} after epoch "
            f"{position.epochs} and step {position.steps}",
            logger="current",
        )


def _take_over_seed(runner: Runner, checkpoint: dict) -> None:
    """Put the recipe's seed into the checkpoint, whose own MMEngine would take."""
    meta, seed = checkpoint["meta"], (runner.cfg.get("randomness") or {}).get("seed")
    before = meta.get("seed", seed)
    if None not in (seed, before) and seed != before:
        meta["seed"] = seed
        print_log(f"draws come from seed {seed} now, and came from {before} before", logger="current")


def _parts(runner: Runner, checkpoint: dict) -> dict[str | None, Part]:
    """The run's optimizer wrappers by their names; a single one, which has none, under None."""
    wrapper, states = runner.optim_wrapper, checkpoint["optimizer"]
    schedulers, saved = runner.param_schedulers, checkpoint.get("param_schedulers")
    if not isinstance(wrapper, OptimWrapperDict):
        return {None: Part(wrapper, states, schedulers or [], saved or [])}
    schedulers, saved = schedulers or {}, saved or {}
    return {
        name: Part(one, states[name], schedulers.get(name, []), saved.get(name, []))
        for name, one in wrapper.items()
    }


def _check_optimizer(optimizer: Optimizer, state: dict, source: str) -> None:
    """Raise ResumeError if the checkpoint's optimizer does not know a number that this one needs."""
    numbers = {name for name, value in optimizer.defaults.items() if type(value) in (int, float, tuple, list)}
    if missing := numbers - state["param_groups"][0].keys():
        raise ResumeError(
            f"`optim_wrapper.optimizer`: {type(optimizer).__name__} needs {', '.join(sorted(missing))}, "
            f"which the optimizer of {source} does not have: its moments are another type's. Set the type "
            f"back, or {WEIGHTS_ALONE}"
        )


def _group_changes(optimizer: Optimizer, state: dict) -> set[str]:
    """Hyper-parameters that the groups were not given when the checkpoint's training began."""
    if len(optimizer.param_groups) != len(state["param_groups"]):
        return {GROUPS}
    pairs = zip(map(_given, optimizer.param_groups), map(_given, state["param_groups"]), strict=True)
    changed = {key for now, before in pairs for key in now.keys() & before.keys() if now[key] != before[key]}
    return {GROUPS if key == "names" else key for key in changed}


def _given(group: dict) -> dict[str, Any]:
    """A group's hyper-parameters before its schedules."""
    given = {key: value for key, value in group.items() if key != "params" and not key.startswith("initial_")}
    given |= {key: group[f"initial_{key}"] for key in given if f"initial_{key}" in group}
    if "initial_momentum" in group and "betas" in group:  # the schedule of a momentum writes both
        given["betas"] = (given.pop("momentum"), *group["betas"][1:])
    return given


def _take_over_ends(built: Sequence[_ParamScheduler], saved: Sequence[dict]) -> None:
    """Let saved schedules by validations last as long as the training now does; where they stand stays."""
    for one, state in zip(built, saved, strict=False):
        if getattr(one, "need_val_args", False) and "end" in state:
            state["end"] = one.end


def _schedule_changes(
    built: Sequence[_ParamScheduler], saved: Sequence[dict], position: Position
) -> set[str]:
    """Whether the schedules are other ones, or stand elsewhere."""
    if [_settings(one.state_dict()) for one in built] != [_settings(state) for state in saved]:
        return {"schedule"}
    moved = [position.of(one) for one in built] != [state["_global_step"] for state in saved]
    return {"steps of the schedule"} if moved else set()


def _settings(state: dict) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key not in COUNTED}


def _replay(schedulers: Sequence[_ParamScheduler], position: Position) -> None:
    """Step schedulers that were just built, in the order of a training: they compute from step to step."""
    if any(getattr(scheduler, "need_val_args", False) for scheduler in schedulers):
        raise ResumeError(
            "the recipe has changed since the checkpoint, and where its schedule by validations "
            f"(`param_scheduler`) would stand is not known: set the recipe back, or {WEIGHTS_ALONE}"
        )
    by_step = [scheduler for scheduler in schedulers if not scheduler.by_epoch]
    by_epoch = [scheduler for scheduler in schedulers if scheduler.by_epoch]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the optimizer makes no steps
        for epoch in range(position.epochs + 1):
            begun, ended = epoch * position.length, epoch < position.epochs
            end = min(begun + position.length, position.steps) if ended else position.steps
            for _ in range(begun, end):
                for scheduler in by_step:
                    scheduler.step()
            for scheduler in by_epoch if ended else ():
                scheduler.step()


def _with_groups(part: Part, source: str) -> dict:
    """A wrapper's state of the checkpoint with the groups of the recipe."""
    wrapper, groups = part.wrapper, part.wrapper.optimizer.param_groups
    keys = _parameters(groups, part.state["param_groups"], source)
    groups = [{**group, "params": parameters} for group, parameters in zip(groups, keys, strict=True)]
    base = {"base_param_settings": wrapper.base_param_settings}  # MMEngine's, for the log
    kept = {key: value for key, value in part.state.items() if key not in base}
    return {**kept, **(base if wrapper.base_param_settings else {}), "param_groups": groups}


def _parameters(groups: list[dict], saved: list[dict], source: str) -> list[list[int | str]]:
    """What the checkpoint calls the parameters of each group, by their names if both know them."""
    if all("names" in group for group in [*groups, *saved]):
        pairs = (zip(group["names"], group["params"], strict=True) for group in saved)
        keys = dict(itertools.chain.from_iterable(pairs))
        if keys.keys() == {name for group in groups for name in group["names"]}:
            return [[keys[name] for name in group["names"]] for group in groups]
    elif [len(group["params"]) for group in groups] == [len(group["params"]) for group in saved]:
        return [group["params"] for group in saved]
    raise ResumeError(
        f"the optimizer of {source} has other parameters, or groups them otherwise, than this recipe's model "
        f"and `optim_wrapper`: set them back, or {WEIGHTS_ALONE}"
    )
