"""A process of a training in several, under torchrun: `distributed_training.py FOLDER KEY=VALUE...`.

It trains the nine steps of `jittered_training` with 4 images a step in all, and notes loss and validation of
each step. `fault` says what goes wrong in the second process at the fourth step.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import jittered_training
import torch
from mmengine.dist import all_reduce, get_rank, get_world_size
from mmengine.hooks import Hook

from mapet_mm.utils.dist import start_processes, stop_processes
from mapet_mm.utils.errors import one_line_errors

FAULTS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exception": lambda: 1 / 0,
    "user": lambda: (_ for _ in ()).throw(OSError("the disk is gone")),
    "memory": lambda: torch.empty(2**50),
    "stuck": lambda: time.sleep(600),
}


class Note(Hook):
    """Loss of each step, as the mean over all processes."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.metrics: list[dict] = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        loss = outputs["loss"].detach().clone()
        all_reduce(loss, op="mean")
        self.losses.append(loss.item())

    def after_val_epoch(self, runner, metrics=None) -> None:
        self.metrics.append(dict(metrics))


class Fault(jittered_training.JitteredNoise):
    """Goes wrong at the 13th image of the second process, in the process that loads it."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.loaded = fault, 0

    def __getitem__(self, index: int) -> dict:
        self.loaded += 1
        if self.loaded == 4 and get_rank() == 1:
            FAULTS[self.fault]()
        return super().__getitem__(index)


@one_line_errors
def main() -> None:
    folder, options = Path(sys.argv[1]), dict(argument.split("=") for argument in sys.argv[2:])
    jittered_training.IMAGES = int(options.get("images", 12))
    start_processes("pytorch")
    extra = dict(model_wrapper_cfg=dict(type="mapet_mm.CPUDistributedDataParallel", broadcast_buffers=False))
    if "val" in options:
        jittered_training.IMAGES = 12
        extra["val_images"] = int(options["val"])
    runner = jittered_training.build(
        folder,
        resume="resume" in options,
        batch=4 // get_world_size(),
        hooks={
            **jittered_training.HOOKS,
            "interruption": dict(type="mapet_mm.InterruptionHook", minutes=None),
        },
        dataset=dict(type=Fault, fault=options["fault"]) if "fault" in options else None,
        drop_path_rate=0.0,
        launcher="pytorch",
        **extra,
    )
    note = Note()
    runner.register_hook(note)
    if "until" in options:
        runner.register_hook(Until(int(options["until"])))
    runner.train()
    if get_rank() == 0:
        said = dict(losses=note.losses, metrics=note.metrics)
        (folder / "said.json").write_text(json.dumps(said))
    del runner
    stop_processes()


class Until(Hook):
    """Tells the second process, or the only one, to end after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_train_iter(self, runner, *args, **kwargs) -> None:
        if runner.iter + 1 == self.step and get_rank() == get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGUSR1)


if __name__ == "__main__":
    main()
