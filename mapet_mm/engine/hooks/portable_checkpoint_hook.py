"""Checkpoints that any `torch.load(weights_only=True)` reads, whole, and of the folder that they lie in."""

import os.path as osp
from collections import OrderedDict, deque
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from mmengine.dist import is_main_process
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import CheckpointHook, Hook
from mmengine.logging import HistoryBuffer, MMLogger
from mmengine.runner import Runner
from torch import Tensor

from mapet_mm.registry import HOOKS
from mapet_mm.utils.atomic_files import replace_file

HISTORY = "log_history"
PLAIN = (Tensor, str, bytes, int, float, complex, type(None), torch.Size, torch.dtype, torch.device)
WHOLE_FILES = "mapet_mm.whole_files"


@register_backend(WHOLE_FILES)
class WholeFileBackend(LocalBackend):
    """MMEngine's local files, each of which appears once it is whole; MMEngine fills them in their place."""

    def put(self, obj: bytes, filepath: str | PurePath) -> None:
        """Write a file in one step."""
        path = Path(filepath)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, bytes(obj))


@HOOKS.register_module()
class PortableCheckpointHook(Hook):
    """Make checkpoints whole, of tensors and plain values only, with paths in the run's own folder.

    A checkpoint on a local disk appears once it is completely written, and the only one is not removed before
    the next exists.

    MMEngine puts its log buffers and NumPy's numbers into a checkpoint; neither can be read without their
    classes. They are written as tensors and numbers, and become log buffers again when a run resumes.
    A run that resumes from a copied folder uses the copy's best checkpoint; MMEngine would remove the
    original's once there is a better one.

    Args:
        recipe: what the run trains with, kept in each checkpoint; tools/train.py gives it.
    """

    def __init__(self, recipe: dict[str, str] | None = None) -> None:
        self.recipe = dict(recipe or {})

    def before_train(self, runner: Runner) -> None:
        """Have MMEngine's CheckpointHook write whole files."""
        hook = checkpoint_hook(runner)
        if hook is None or hook.backend_args or hook.file_client_args:
            return
        hook.backend_args = whole_files(hook.out_dir)
        if hook.max_keep_ckpts == 1:  # it removes the oldest before it writes the newest
            hook.max_keep_ckpts = 2
        if is_main_process():  # what killed runs had not written to the end
            for partial in Path(_checkpoint_folder(runner)).glob(".*.pth.*.partial"):
                partial.unlink(missing_ok=True)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Replace, in the checkpoint alone, what is not a tensor or a plain value."""
        if self.recipe and "meta" in checkpoint:
            checkpoint["meta"]["recipe"] = self.recipe
        hub = checkpoint.get("message_hub", {})
        if buffers := hub.get("log_scalars"):
            checkpoint[HISTORY] = {name: _to_tensors(buffer) for name, buffer in buffers.items()}
            checkpoint["message_hub"] = {**hub, "log_scalars": {}}
        others: set[str] = set()
        for name, value in checkpoint.items():
            checkpoint[name] = _plain(value, name, others)
        if others:
            MMLogger.get_current_instance().warning(
                f"the checkpoint holds Python objects ({', '.join(sorted(others))}): "
                "--resume will need --trust-checkpoint"
            )

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Make log buffers again, and point to the run's own folder."""
        hub = checkpoint.get("message_hub")
        if not hub:
            return
        for name, history in checkpoint.pop(HISTORY, {}).items():
            hub["log_scalars"][name] = _to_buffer(history)
        folder = _checkpoint_folder(runner)
        for name, value in hub["runtime_info"].items():
            if name == "last_ckpt" or name.startswith("best_ckpt"):
                hub["runtime_info"][name] = osp.join(folder, osp.basename(value)) if value else value


def checkpoint_hook(runner: Runner) -> CheckpointHook | None:
    """MMEngine's hook that saves the run's checkpoints, if it has one."""
    return next((hook for hook in runner.hooks if isinstance(hook, CheckpointHook)), None)


def whole_files(folder: str | PurePath | None) -> dict[str, str] | None:
    """`backend_args` of MMEngine for whole files in a folder; of an address its own."""
    return None if "://" in str(folder) else dict(backend=WHOLE_FILES)


def checkpoint_folder(work_dir: str, out_dir: str | None) -> str:
    """Where MMEngine's CheckpointHook writes: the work dir, or a folder of its name in `out_dir`."""
    if out_dir is None or str(out_dir) == work_dir:
        return work_dir
    return osp.join(out_dir, osp.basename(work_dir.rstrip(osp.sep)))


def _checkpoint_folder(runner: Runner) -> str:
    return checkpoint_folder(runner.work_dir, getattr(checkpoint_hook(runner), "out_dir", None))


def _to_tensors(buffer: HistoryBuffer) -> dict[str, Any]:
    values, counts = (torch.from_numpy(np.array(array)) for array in buffer.data)
    return {"values": values, "counts": counts, "max_length": buffer.max_length}


def _to_buffer(history: Mapping[str, Any]) -> HistoryBuffer:
    values, counts = (history[key].cpu().numpy() for key in ("values", "counts"))
    return HistoryBuffer(values, counts, history["max_length"])


def _plain(value: Any, place: str, others: set[str]) -> Any:
    """The value with NumPy's numbers and arrays as Python's; `others` takes the places of other objects."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.item() if isinstance(value, np.generic) else value.tolist()
    if type(value) in (bool, *PLAIN) or isinstance(value, Tensor) or hasattr(value, "_metadata"):
        return value  # a model's state dict has `_metadata`, which a copy would lose
    if isinstance(value, Mapping):
        items = ((_plain(k, place, others), _plain(v, f"{place}.{k}", others)) for k, v in value.items())
        return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        items = [_plain(one, f"{place}.{index}", others) for index, one in enumerate(value)]
        return next((kind(items) for kind in (tuple, set) if isinstance(value, kind)), items)
    if isinstance(value, PurePath):
        return str(value)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    others.add(place)
    return value
