"""Processes that train the nine steps, one after the other, each until it kills itself.

    killed_training.py FOLDER STEP:WHERE ... [compiled]

Each goes on from the last whole checkpoint. WHERE is `step`, after it, or `writing`, in the middle of
its checkpoint's file. The exit codes are printed. The processes are forked off this one, which only imports.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path

import jittered_training
from mmengine.config import Config
from mmengine.hooks import Hook

from mapet_mm.engine.runners.resume import find_checkpoint
from mapet_mm.utils import atomic_files as file_replacement


class Kill(Hook):
    """Sends SIGKILL to its own process."""

    priority = "LOWEST"

    def __init__(self, step: int, where: str) -> None:
        self.step, self.where = step, where

    def after_train_iter(self, runner, *args, **kwargs) -> None:
        if self.where == "step" and runner.iter + 1 == self.step:
            os.kill(os.getpid(), signal.SIGKILL)

    def before_save_checkpoint(self, runner, checkpoint) -> None:
        if self.where == "writing" and runner.iter + 1 == self.step:
            file_replacement.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, step: int, where: str, compiled: bool) -> None:
    options = dict(
        optim_wrapper=dict(type="mapet_mm.AutocastOptimWrapper", accumulative_counts=2),
        custom_hooks=[dict(type="EMAHook", momentum=0.1)],
    )
    if compiled:
        options["custom_hooks"].append(dict(type="mapet_mm.CompileHook", backend="aot_eager"))
    hook = dict(type="CheckpointHook", by_epoch=False, interval=1)
    cfg = Config(dict(work_dir=str(folder), default_hooks=dict(checkpoint=hook)))
    found = folder.exists() and find_checkpoint(cfg)
    # The last checkpoint may be one that was never written to the end: MMEngine's own search would take it.
    runner = jittered_training.build(folder, resume=bool(found), workers=step % 3, **options)
    runner._load_from = found or None
    runner.register_hook(Kill(step, where))
    runner.train()


def exit_code(*arguments: object) -> int:
    """Of a process that trains so."""
    if (child := os.fork()) == 0:
        try:
            train(*arguments)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    kills = [kill.split(":") for kill in sys.argv[2:] if ":" in kill]
    folder, compiled = Path(sys.argv[1]), "compiled" in sys.argv
    print(json.dumps([exit_code(folder, int(step), where, compiled) for step, where in kills]))


if __name__ == "__main__":
    main()
