"""Checkpoints that are whole, that any `torch.load(weights_only=True)` reads, and that fit their model."""

import warnings
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from mmengine.dist import is_main_process
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import CheckpointHook, Hook
from mmengine.runner import Runner

from mapet_mm.interop.description import description_entry
from mapet_mm.registry import HOOKS
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.dist import unwrapped
from mapet_mm.utils.errors import UserError, listed

WHOLE_FILES = "mapet_mm.whole_files"
# Steps that a log looks back on, at most: as many as an epoch of ImageNet in batches of 128.
LOGGED = 10_000
# Entries of a checkpoint that hold more than tensors.
DESCRIBING = ("meta", "message_hub", "param_schedulers")
# Entries of a config that decide the rates.
RATES = ("param_scheduler", "optim_wrapper", "auto_scale_lr")


@register_backend(WHOLE_FILES)
class WholeFileBackend(LocalBackend):
    """MMEngine's local files, each written in one step; MMEngine's own backend fills them in place."""

    def put(self, obj: bytes, filepath: str | PurePath) -> None:
        """Write a file in one step."""
        path = Path(filepath)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, bytes(obj))


@HOOKS.register_module()
class PortableCheckpointHook(Hook):
    """Write whole checkpoints of tensors and plain values, and refuse weights that fit no layer.

    On a local disk, a checkpoint appears when it is complete, and the only one stays until the next exists.
    NumPy's numbers become Python's, and MMEngine's log buffers, which grow with each step, are left out. A
    run resumed in a copied folder uses the copy's best checkpoint. One resumed with other rates or schedules
    goes on at the rate that these have at its step.

    Args:
        recipe: the run's settings, kept in each checkpoint; tools/train.py passes them.
    """

    def __init__(self, recipe: dict[str, Any] | None = None) -> None:
        self.recipe = recipe
        self.has_new_rates = False

    def before_train(self, runner: Runner) -> None:
        """Have MMEngine's CheckpointHook write whole files, where it writes to a local disk."""
        if self.has_new_rates and runner.iter:
            replay_schedules(runner)
        hook = checkpoint_hook(runner)
        if hook is None or hook.backend_args or hook.file_client_args or "://" in str(hook.out_dir):
            return
        hook.backend_args = dict(backend=WHOLE_FILES)
        if hook.max_keep_ckpts == 1:  # it removes the oldest before it writes the newest
            hook.max_keep_ckpts = 2
        if is_main_process():  # left by a run that was killed while writing
            for partial in Path(hook.out_dir or runner.work_dir).glob(".*.pth.*.partial"):
                partial.unlink(missing_ok=True)

    def after_train_iter(self, runner: Runner, *args: object, **kwargs: object) -> None:
        """Keep MMEngine's log buffers short, for each step copies them."""
        for buffer in runner.message_hub.log_scalars.values():
            buffer.max_length = LOGGED

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Add a description for exports; leave tensors and plain values, in the checkpoint alone."""
        if "meta" in checkpoint:
            recipe = {"recipe": self.recipe} if self.recipe else {}
            checkpoint["meta"].update(description_entry(runner.cfg), **recipe)
        if hub := checkpoint.get("message_hub"):
            keys = {key: one for key, one in hub["resumed_keys"].items() if key in hub["runtime_info"]}
            checkpoint["message_hub"] = {**hub, "log_scalars": {}, "resumed_keys": keys}
        checkpoint.update({name: _plain(checkpoint[name]) for name in DESCRIBING if name in checkpoint})

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Check the weights' names, and take the run's own best checkpoint, and its own schedules.

        Raises:
            UserError: no weight has the name of one of the model's: MMEngine would only warn.
        """
        # MMEngine runs this text as a config when it resumes; it writes none itself.
        checkpoint.get("meta", {}).pop("config", None)
        weights = [name.removeprefix("module.") for name in checkpoint.get("state_dict", checkpoint)]
        names = [name.removeprefix("module.") for name in unwrapped(runner.model).state_dict()]
        if set(names).isdisjoint(weights):
            raise UserError(
                f"no weight of the checkpoint has a name of the model's: it has {listed(weights, 3)}, "
                f"the model {listed(names, 3)}; tools/convert.py renames timm's and Hugging Face's"
            )
        before, now = checkpoint.get("meta", {}).get("recipe"), self.recipe
        self.has_new_rates = bool(before and now) and any(before.get(key) != now.get(key) for key in RATES)
        if self.has_new_rates:  # MMEngine loads nothing into its new schedules
            checkpoint["param_schedulers"] = [{} for _ in checkpoint.get("param_schedulers") or ()]
        information = checkpoint.get("message_hub", {}).get("runtime_info", {})
        for name in [name for name in information if name.startswith("best_ckpt")]:
            own = Path(runner.work_dir, Path(information[name] or "").name)
            information[name] = str(own) if own.is_file() else information[name]


def replay_schedules(runner: Runner) -> None:
    """Bring new schedules, and the rates with them, to the step that a resumed run stands at."""
    for scheduler in runner.param_schedulers or ():
        for group, value in zip(scheduler.optimizer.param_groups, scheduler.get_last_value(), strict=True):
            group[scheduler.param_name] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer makes no step meanwhile
        for scheduler in runner.param_schedulers or ():
            for _ in range(runner.epoch if scheduler.by_epoch else runner.iter):
                scheduler.step()


def checkpoint_hook(runner: Runner) -> CheckpointHook | None:
    """MMEngine's hook that saves the run's checkpoints, if there is one."""
    return next((hook for hook in runner.hooks if isinstance(hook, CheckpointHook)), None)


def _plain(value: Any) -> Any:
    """A value with Python's numbers and texts instead of NumPy's numbers, arrays and paths."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else list(map(_plain, value))
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return str(value) if isinstance(value, PurePath) else value
