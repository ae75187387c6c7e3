"""Schedules that are longer than their training, and checkpoints that are counted in another unit."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mmengine.config import Config

from mapet_mm.utils.config import type_name
from mapet_mm.utils.dist import print_to_user

# A schedule may end this much after the training: its rate is then all but the last.
TOLERANCE = 1.1
# Entries of a scheduler that name an epoch or an iteration.
POSITIONS = ("begin", "milestones", "last_step", "T_max", "end")


def check_schedule(cfg: Config) -> None:
    """Warn, with the options to set, if the last scheduler ends clearly after the training.

    `--cfg-options train_cfg.max_epochs=5` alone leaves a schedule of 300 epochs in its warm-up.
    """
    unit, length = training_length(cfg)
    schedulers = dict(own_schedulers(cfg.get("param_scheduler"), by_epoch=unit == "epochs"))
    ends = [end for end in map(end_of, schedulers.values()) if end is not None]
    if length is None or not ends or max(ends) <= TOLERANCE * length:
        return
    shorter = shortened_positions(schedulers.values(), max(ends), length)
    options = []
    for key, scheduler in schedulers.items():
        options += shorter_options(key, scheduler, shorter)
    print_to_user(
        f"warning: the training ends after {length} {unit} and its schedule after {max(ends)}, so the "
        f"learning rate does not fall to its end: --cfg-options {' '.join(options)}"
    )


def check_checkpoints(cfg: Config) -> None:
    """Warn if a training of iterations counts its checkpoints in epochs, as MMEngine's hook does by default.

    To MMEngine the training is one epoch: its only checkpoint would be written at the end.
    `InterruptionHook` saves in between.
    """
    unit, length = training_length(cfg)
    hooks = cfg.get("default_hooks") or {}
    hook = hooks.get("checkpoint", {})  # MMEngine's own, if a config lists none
    if unit == "epochs" or length is None or hook is None or not hook.get("by_epoch", True):
        return
    if lists_hook(cfg, "InterruptionHook"):
        return
    print_to_user(
        f"warning: CheckpointHook counts epochs, this training {length} iterations, so no checkpoint is "
        "written before its end: --cfg-options default_hooks.checkpoint.type=CheckpointHook "
        f"default_hooks.checkpoint.by_epoch=False default_hooks.checkpoint.interval={max(1, length // 10)}"
    )


def lists_hook(cfg: Config, name: str) -> bool:
    """True if a config lists a hook of this type."""
    hooks = [*(cfg.get("default_hooks") or {}).values(), *(cfg.get("custom_hooks") or ())]
    return any(is_of_type(hook, name) for hook in hooks)


def is_of_type(node: Any, name: str) -> bool:
    """True for an entry of a config whose type has this name, with or without a scope."""
    return isinstance(node, Mapping) and "type" in node and type_name(node["type"]) == name


def shortened_positions(schedulers: Iterable[dict], old_length: int, length: int) -> dict[int, int]:
    """The new place of each epoch or iteration that schedulers name, in the same order, apart by 1 at least.

    What lies after the schedule's length keeps its distance: a cosine of 300 epochs by epoch ends at 301.
    """
    named: set[int] = set()
    for scheduler in schedulers:
        named.update(positions_of(scheduler))
    shorter: dict[int, int] = {}
    last = 0
    for position in sorted(named):
        if position > old_length:
            shorter[position] = length + position - old_length
        else:
            last = max(last + 1, round(position * length / old_length))
            shorter[position] = min(last, length)
    return shorter


def shorter_options(key: str, scheduler: dict, shorter: dict[int, int]) -> list[str]:
    """The options that move all positions of a scheduler."""
    values: dict[str, Any] = {}
    for name in POSITIONS:
        if name == "milestones" and scheduler.get(name):
            values[name] = [shorter[position] for position in scheduler[name]]
        elif scheduler.get(name):
            values[name] = shorter[scheduler[name]]
    if "begin" in values and "end" in values:  # one step is left, also of one epoch
        values["begin"] = min(values["begin"], values["end"] - 1)
    return [f"{key}.{name}={str(value).replace(' ', '')}" for name, value in values.items()]


def positions_of(scheduler: dict) -> list[int]:
    """The epochs or iterations that a scheduler names, but for 0."""
    positions = list(scheduler.get("milestones") or ())
    for name in POSITIONS:
        if name != "milestones" and scheduler.get(name):
            positions.append(scheduler[name])
    return positions


def training_length(cfg: Config) -> tuple[str, int | None]:
    """Unit and length of a training: epochs, or iterations; None if the config has neither."""
    loop = cfg.get("train_cfg") or {}
    if loop.get("max_epochs"):
        return "epochs", loop["max_epochs"]
    return "iterations", loop.get("max_iters")


def own_schedulers(config: Any, by_epoch: bool) -> Iterator[tuple[str, dict]]:
    """The schedulers of a config that count in the training's own unit, with their keys."""
    if isinstance(config, dict):
        numbered = [("param_scheduler", config)]
    else:
        numbered = [(f"param_scheduler.{index}", one) for index, one in enumerate(config or ())]
    for key, scheduler in numbered:
        if "type" in scheduler and scheduler.get("by_epoch", True) == by_epoch:
            yield key, scheduler


def end_of(scheduler: dict) -> int | None:
    """Where a scheduler's curve ends, from the training's start; None if it says none."""
    if "T_max" not in scheduler:
        return scheduler.get("end")
    # Steps of the cosine that lie before `begin`, as in timm's curve; `end` may let it stay at its last rate.
    skipped = scheduler["last_step"] + 1 if "last_step" in scheduler else 0
    return scheduler.get("begin", 0) - skipped + scheduler["T_max"]
