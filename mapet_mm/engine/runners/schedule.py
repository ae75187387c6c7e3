"""A schedule that is longer than its training: the learning rate would never fall."""

from collections.abc import Iterator
from typing import Any

from mmengine.config import Config

from mapet_mm.utils.dist import print_to_user

# A schedule may end this much after the training: its rate is then all but the last.
TOLERANCE = 1.1
LENGTHS = ("begin", "end", "T_max")


def check_schedule(cfg: Config) -> None:
    """Warn, with the options to set, if the last scheduler ends clearly after the training.

    `--cfg-options train_cfg.max_epochs=5` alone leaves a schedule of 300 epochs in its warm-up.
    """
    unit, length = training_length(cfg)
    schedulers = dict(own_schedulers(cfg.get("param_scheduler"), by_epoch=unit == "epochs"))
    ends = [end for end in map(end_of, schedulers.values()) if end is not None]
    if length is None or not ends or max(ends) <= TOLERANCE * length:
        return
    options = []
    for key, scheduler in schedulers.items():
        options += shortened(key, scheduler, length / max(ends))
    print_to_user(
        f"warning: the training ends after {length} {unit} and its schedule after {max(ends)}, so the "
        f"learning rate does not fall to its end: --cfg-options {' '.join(options)}"
    )


def shortened(key: str, scheduler: dict, share: float) -> list[str]:
    """Options that shorten a scheduler to a share of its length, to one epoch or iteration at least."""
    lengths = {name: max(1, round(scheduler[name] * share)) for name in LENGTHS if scheduler.get(name)}
    if "begin" in lengths and "end" in lengths:
        lengths["begin"] = min(lengths["begin"], lengths["end"] - 1)
    return [f"{key}.{name}={length}" for name, length in lengths.items()]


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
    """The epoch or iteration at which a scheduler ends; None if it says none."""
    if "end" in scheduler:
        return scheduler["end"]
    if "T_max" in scheduler:
        return scheduler.get("begin", 0) + scheduler["T_max"]
    return None
