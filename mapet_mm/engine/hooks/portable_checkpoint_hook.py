"""Checkpoints that appear whole, say what they are, fit their model, and resume in another folder."""

import warnings
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from mmengine.dist import is_main_process
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import CheckpointHook, Hook
from mmengine.runner import Runner

from mapet_mm.engine.runners.resume import check_weights
from mapet_mm.interop.description import description_entry
from mapet_mm.interop.record import NUM_IMAGES
from mapet_mm.registry import HOOKS
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.dist import unwrapped

WHOLE_FILES = "mapet_mm.whole_files"
# Steps that a log looks back on, at most: as many as an epoch of ImageNet in batches of 128.
MAX_LOGGED_STEPS = 10_000
# Entries of a checkpoint that hold more than tensors.
NON_TENSOR_KEYS = ("meta", "message_hub", "param_schedulers")
# Entries of a config that decide the rates.
RATE_KEYS = ("param_scheduler", "optim_wrapper", "auto_scale_lr")


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
    `torch.load(weights_only=True)` reads it: NumPy's numbers become Python's, and MMEngine's log buffers,
    which grow with each step, are left out. Each has a description of the network and the number of training
    images for exports. In a copied work dir, `best_ckpt` points into the copy. After a change of schedule,
    training continues at the new schedule's rate for the current step.

    Args:
        recipe: digests of the run's config, kept in each checkpoint; `mapet-mm train` passes them.
    """

    def __init__(self, recipe: dict[str, Any] | None = None) -> None:
        self.recipe = recipe
        self.has_new_rates = False

    def before_train(self, runner: Runner) -> None:
        """Have whole files written to a local disk, and bring new schedules to a resumed run's step."""
        hook = checkpoint_hook(runner)
        is_told_where = hook is not None and (hook.backend_args or hook.file_client_args)
        if hook is not None and not is_told_where and "://" not in str(hook.out_dir):
            write_whole_files(hook, runner.work_dir)
        if self.has_new_rates and runner.iter:
            replay_schedules(runner)

    def after_train_iter(self, runner: Runner, *args: object, **kwargs: object) -> None:
        """Keep MMEngine's log buffers short, for each step copies them."""
        for buffer in runner.message_hub.log_scalars.values():
            buffer.max_length = MAX_LOGGED_STEPS

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Add what exports describe and the config's digests; leave tensors and plain values."""
        if "meta" in checkpoint:
            checkpoint["meta"].update(description_entry(runner.cfg))
            if self.recipe:
                checkpoint["meta"]["recipe"] = self.recipe
            checkpoint["meta"][NUM_IMAGES] = len(runner.train_dataloader.dataset)
        hub = checkpoint.get("message_hub")
        if hub:  # in the checkpoint alone: the run's own goes on
            keys = {key: one for key, one in hub["resumed_keys"].items() if key in hub["runtime_info"]}
            checkpoint["message_hub"] = {**hub, "log_scalars": {}, "resumed_keys": keys}
        for name in NON_TENSOR_KEYS:
            if name in checkpoint:
                checkpoint[name] = without_numpy(checkpoint[name])

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Check the weights' names, and take the run's own best checkpoint, and its own schedules.

        Raises:
            UserError: no weight has the name of one of the model's: MMEngine would only warn.
        """
        meta = checkpoint.get("meta", {})
        # MMEngine runs this text as a config when it resumes; it writes none itself.
        meta.pop("config", None)
        check_weights(unwrapped(runner.model), checkpoint)
        before = meta.get("recipe")
        if before and self.recipe:
            self.has_new_rates = any(before.get(key) != self.recipe.get(key) for key in RATE_KEYS)
        if self.has_new_rates:  # MMEngine loads nothing into its new schedules
            checkpoint["param_schedulers"] = [{} for _ in checkpoint.get("param_schedulers") or ()]
        information = checkpoint.get("message_hub", {}).get("runtime_info", {})
        point_best_checkpoints_to(Path(runner.work_dir), information)


def checkpoint_hook(runner: Runner) -> CheckpointHook | None:
    """MMEngine's hook that saves the run's checkpoints, if there is one."""
    return next((hook for hook in runner.hooks if isinstance(hook, CheckpointHook)), None)


def write_whole_files(hook: CheckpointHook, work_dir: str) -> None:
    """Have each checkpoint written in one step, and remove what a killed run left half-written."""
    hook.backend_args = dict(backend=WHOLE_FILES)
    if hook.max_keep_ckpts == 1:  # it removes the oldest before it writes the newest
        hook.max_keep_ckpts = 2
    if is_main_process():
        for partial in Path(hook.out_dir or work_dir).glob(".*.pth.*.partial"):
            partial.unlink(missing_ok=True)


def without_numpy(value: Any) -> Any:
    """A value with Python's numbers and texts instead of NumPy's numbers, arrays and paths."""
    if isinstance(value, Mapping):
        return {without_numpy(key): without_numpy(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        plain = [without_numpy(one) for one in value]
        return tuple(plain) if type(value) is tuple else plain
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, PurePath):
        return str(value)
    return value


def point_best_checkpoints_to(work_dir: Path, information: dict) -> None:
    """Let MMEngine's records of the best checkpoints name this folder's files, where it has them."""
    for name, recorded in list(information.items()):
        if name.startswith("best_ckpt") and recorded:
            own = work_dir / Path(recorded).name
            if own.is_file():
                information[name] = str(own)


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
