"""A process of a training in several, under torchrun: `distributed_training.py FOLDER KEY=VALUE...`.

It trains the nine steps of `trainings` with 4 images a step in all, and notes loss and validation of
each step. `until` tells the last process to end after a step.
"""

import json
import os
import signal
import sys
from pathlib import Path

import trainings
from mmengine.dist import all_reduce, get_rank, get_world_size
from mmengine.hooks import Hook

from mapet_mm.utils.dist import start_processes, stop_processes


class Watch(Hook):
    """Notes each step's loss, as the mean over all processes, and may tell the last process to end."""

    def __init__(self, until: int) -> None:
        self.until = until
        self.said: dict[str, list] = dict(losses=[], metrics=[])

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        loss = outputs["loss"].detach().clone()
        all_reduce(loss, op="mean")
        self.said["losses"].append(loss.item())
        if runner.iter + 1 == self.until and get_rank() == get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    def after_val_epoch(self, runner, metrics=None) -> None:
        self.said["metrics"].append(dict(metrics))


def main() -> None:
    folder, options = Path(sys.argv[1]), dict(argument.split("=") for argument in sys.argv[2:])
    trainings.IMAGES = 12
    start_processes("pytorch")
    runner = trainings.build(
        folder,
        resume="resume" in options,
        batch=4 // get_world_size(),
        hooks={**trainings.HOOKS, "interruption": dict(type="mapet_mm.InterruptionHook", interval=2)},
        drop_path_rate=0.0,
        launcher="pytorch",
        model_wrapper_cfg=dict(type="MMDistributedDataParallel", broadcast_buffers=False, device_ids=None),
        val_images=int(options["val"]) if "val" in options else None,
    )
    runner.register_hook(watch := Watch(int(options.get("until", 0))))
    runner.train()
    if get_rank() == 0:
        (folder / "said.json").write_text(json.dumps(watch.said))
    del runner
    stop_processes()


if __name__ == "__main__":
    main()
