"""Checkpoints that appear whole, of tensors and plain values, which `weights_only=True` reads."""

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from mmengine.dist import is_main_process
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import CheckpointHook, Hook
from mmengine.runner import Runner

from mapet_mm.utils.atomic_files import replace_file

WHOLE_FILES = "mapet_mm.whole_files"
# Steps that a log looks back on, at most: as many as an epoch of ImageNet in batches of 128.
MAX_LOGGED_STEPS = 10_000
# Entries of a checkpoint that hold more than tensors.
NON_TENSOR_KEYS = ("meta", "message_hub", "param_schedulers")


@register_backend(WHOLE_FILES)
class WholeFileBackend(LocalBackend):
    """MMEngine's local files, each written in one step; MMEngine's own backend fills them in place."""

    def put(self, obj: bytes, filepath: str | PurePath) -> None:
        """Write a file in one step."""
        path = Path(filepath)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, bytes(obj))


class WholeCheckpointHook(Hook):
    """Have MMEngine write whole checkpoints of tensors and plain values.

    On a local disk, a checkpoint appears when it is complete, and the only one stays until the next exists.
    NumPy's numbers become Python's, and MMEngine's log buffers, which grow with each step, are left out.
    """

    def before_train(self, runner: Runner) -> None:
        """Have MMEngine's CheckpointHook write whole files, where it writes to a local disk."""
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
            buffer.max_length = MAX_LOGGED_STEPS

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Leave tensors and plain values, in the checkpoint alone."""
        hub = checkpoint.get("message_hub")
        if hub:
            keys = {key: one for key, one in hub["resumed_keys"].items() if key in hub["runtime_info"]}
            checkpoint["message_hub"] = {**hub, "log_scalars": {}, "resumed_keys": keys}
        for name in NON_TENSOR_KEYS:
            if name in checkpoint:
                checkpoint[name] = without_numpy(checkpoint[name])


def checkpoint_hook(runner: Runner) -> CheckpointHook | None:
    """MMEngine's hook that saves the run's checkpoints, if there is one."""
    return next((hook for hook in runner.hooks if isinstance(hook, CheckpointHook)), None)


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
