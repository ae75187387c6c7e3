"""Checkpoints within an epoch: every so many minutes, and at a signal."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import torch
from mmengine.dist import all_reduce, barrier, get_world_size, is_main_process
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.runner import Runner

from mapet_mm.engine.hooks.whole_checkpoint_hook import WHOLE_FILES, checkpoint_hook
from mapet_mm.registry import HOOKS
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.errors import STOPPED

LATEST = "latest.pth"
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
NOTHING, SAVE, STOP = range(3)


@HOOKS.register_module()
class InterruptionHook(Hook):
    """Write `latest.pth` every few minutes, and at a signal, after which the run ends with exit code 75.

    The same command then resumes with the next batch. Slurm sends SIGUSR1 before a job's time limit
    (`--signal`) and SIGTERM when it takes the machine away; Ctrl-C sends SIGINT, and a second one ends the
    run at once. All processes save after the same step, whichever of them got the signal.

    Args:
        minutes: between two checkpoints; None writes one only at a signal.
        interval: steps after which several processes tell each other whether to save. Each time they wait for
            each other, and for their devices.
    """

    priority = "LOWEST"  # after CheckpointHook, whose checkpoint may be of the same step

    def __init__(self, minutes: float | None = 30, interval: int = 10) -> None:
        self.minutes = minutes
        self.interval = interval
        self.signal_received: int | None = None
        self._before: dict[int, object] = {}

    def before_train(self, runner: Runner) -> None:
        """Listen to the signals, which Python takes in the main thread alone."""
        self.process = os.getpid()
        self.saved_at = time.monotonic()
        self.signal_received = None
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        loader = runner.train_dataloader
        if loader.num_workers:
            ending = multiprocessing.RawValue("b")
            atexit.register(setattr, ending, "value", True)
            loader.worker_init_fn = partial(start_patient_worker, loader.worker_init_fn, ending)

    def after_train_iter(self, runner: Runner, *args: object, **kwargs: object) -> None:
        """Save if it is time, and end if any process got a signal."""
        is_alone = get_world_size() == 1
        if not is_alone and (runner.iter + 1) % self.interval:
            return
        wish = NOTHING
        if self.minutes is not None and time.monotonic() - self.saved_at > 60 * self.minutes:
            wish = SAVE
        if self.signal_received:
            wish = STOP
        if not is_alone:  # what any process wants, all do after the same step
            wishes = torch.tensor(wish)
            all_reduce(wishes, op="max")
            wish = int(wishes)
        if wish == NOTHING:
            return
        self._save(runner)
        if wish == STOP:
            barrier()  # until the first process has written
            name = "another process's signal"
            if self.signal_received:
                name = signal.Signals(self.signal_received).name
            print_log(
                f"{name}: stopped after step {runner.iter + 1}. Run the same command again to continue.",
                "current",
            )
            self._restore()
            raise SystemExit(STOPPED)

    def after_train(self, runner: Runner) -> None:
        """Leave the signals as they were, and no checkpoint from before the end."""
        self._restore()
        record = Path(runner.work_dir, "last_checkpoint")
        if is_main_process() and record.is_file() and Path(record.read_text()).name != LATEST:
            Path(_folder(runner), LATEST).unlink(missing_ok=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.process:  # a fork of the run's process ends as it would without the hook
            self._restore()
            signal.raise_signal(number)
        elif number == signal.SIGINT and self.signal_received:
            self._restore()
            raise KeyboardInterrupt
        self.signal_received = number
        os.write(2, f"\n{signal.Signals(number).name}: saving after this step, then ending\n".encode())

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _save(self, runner: Runner) -> None:
        self.saved_at = time.monotonic()
        folder = _folder(runner)
        meta = dict(epoch=runner.epoch, iter=runner.iter + 1)
        backend = None if "://" in folder else dict(backend=WHOLE_FILES)
        runner.save_checkpoint(folder, LATEST, meta=meta, by_epoch=False, backend_args=backend)
        if is_main_process():
            replace_file(Path(runner.work_dir, "last_checkpoint"), os.path.join(folder, LATEST).encode())


def start_patient_worker(start: Callable[[int], None] | None, ending: ctypes.c_byte, worker: int) -> None:
    """Let a loader's worker ignore the first signal.

    Slurm signals every process of a job; PyTorch's workers would die and take the run with them before it
    saves. A second signal, or the first one while the run shuts down (`ending`), ends the worker.
    """

    def outlive(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if ending.value:
            os._exit(0)

    if start is not None:
        start(worker)
    for number in SIGNALS:
        signal.signal(number, outlive)


def _folder(runner: Runner) -> str:
    return getattr(checkpoint_hook(runner), "out_dir", runner.work_dir)
