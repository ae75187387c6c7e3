"""Checkpoints within an epoch: every so many minutes, at a signal, and when a loader's worker is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from mmengine.dist import all_reduce, barrier, get_world_size, is_main_process
from mmengine.hooks import EMAHook, Hook
from mmengine.logging import print_log
from mmengine.runner import Runner

from mapet_mm.engine.hooks.portable_checkpoint_hook import WHOLE_FILES, checkpoint_hook
from mapet_mm.registry import HOOKS
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.errors import STOPPED, worker_message
from mapet_mm.utils.loader_workers import outlive_signals
from mapet_mm.utils.signals import SAME_SIGNAL_SECONDS, listen

LATEST = "latest.pth"
NOTHING, SAVE, STOP = range(3)
LOOK_SECONDS = 5  # between two looks of several processes: Slurm kills 30 s after its SIGTERM


@HOOKS.register_module()
class InterruptionHook(Hook):
    """Write `latest.pth` every few minutes, and at a signal, after which the run ends with exit code 75.

    The same command then resumes with the next batch. Slurm sends SIGUSR1 before a job's time limit
    (`--signal`) and SIGTERM when it takes the machine away; Ctrl-C sends SIGINT, and a terminal that closes
    SIGHUP, which nohup keeps away. All processes save after the same step, whichever of them got the signal.
    A further signal, 10 s later or more, ends a run that hangs: at once and unsaved.

    The workers of the run's loaders outlive these signals. Where MMEngine starts the training's before any
    hook (0.10.7, in loops of iterations), `EpochSeedHook` starts others.

    A loader's worker that is killed, most often because memory is full, ends the run with exit code 1; what
    the first process has in memory is saved.

    Args:
        minutes: between two checkpoints; None writes one only at a signal.
        interval: steps after which several processes tell each other whether to save, or fewer if these take
            more than five seconds. Each time they wait for each other, and for their devices.
    """

    priority = "LOWEST"  # after CheckpointHook, whose checkpoint may be of the same step

    def __init__(self, minutes: float | None = 30, interval: int = 10) -> None:
        self.minutes = minutes
        self.interval = interval

    def before_run(self, runner: Runner) -> None:
        """Let the workers of all loaders outlive the signals; before a hook makes another loader of one."""
        for loop in (runner.train_loop, runner.val_loop):
            if loop is not None:
                outlive_signals(loop.dataloader)

    def before_train(self, runner: Runner) -> None:
        """Listen to the signals."""
        self.runner = runner
        self.process = os.getpid()
        self.saved_at = time.monotonic()
        self.is_saving = False
        self.signal_received: int | None = None
        self._plan_look(runner.iter, seconds=LOOK_SECONDS / self.interval)
        self.stop_listening = listen(self._on_signal)
        self.workers = KilledWorkers(self._end_without_worker)
        self.whole_step: dict[str, int] | None = None  # that the model in memory stands after

    def before_train_iter(self, runner: Runner, *args: object, **kwargs: object) -> None:
        """Let no killed worker end a step half-way."""
        self.workers.begin_step()

    def after_train_iter(self, runner: Runner, *args: object, **kwargs: object) -> None:
        """Save if it is time, and end if any process got a signal."""
        self.whole_step = dict(epoch=runner.epoch, iter=runner.iter + 1)
        self.workers.end_step()
        wish = self._common_wish()
        if wish != NOTHING:
            self._save()
        if wish == STOP:
            self._stop()
        if (runner.iter + 1) % len(runner.train_dataloader) == 0:
            self.whole_step = None  # the other hooks have yet to end the epoch

    def after_train_epoch(self, runner: Runner) -> None:
        """Note that the epoch is whole."""
        self.whole_step = dict(epoch=runner.epoch + 1, iter=runner.iter)

    def after_train(self, runner: Runner) -> None:
        """Leave the signals as they were, and no checkpoint from before the end."""
        self.stop_listening()
        self.workers.give_back()
        record = Path(runner.work_dir, "last_checkpoint")
        if is_main_process() and record.is_file() and Path(record.read_text()).name != LATEST:
            Path(_folder(runner), LATEST).unlink(missing_ok=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_fork = os.getpid() != self.process  # as of a metric's pool: it ends as it would without the hook
        is_further = False
        if self.signal_received and not self.is_saving:
            is_further = time.monotonic() > self.received_at + SAME_SIGNAL_SECONDS
        if is_fork or is_further:
            self.stop_listening()
            signal.raise_signal(number)
        elif not self.signal_received:
            self.signal_received = number
            self.received_at = time.monotonic()
            name = signal.Signals(number).name
            line = f"\n{name}: saving after this step, then ending (a further one after 10 s ends at once)\n"
            os.write(2, line.encode())

    def _common_wish(self) -> int:
        """What this process wants; of several, what any wants, so that all do it after the same step."""
        wish = NOTHING
        if self.minutes is not None and time.monotonic() - self.saved_at > 60 * self.minutes:
            wish = SAVE
        if self.signal_received:
            wish = STOP
        if get_world_size() == 1:
            return wish
        step = self.runner.iter + 1
        if step < self.next_look:
            return NOTHING
        seconds = (time.monotonic() - self.looked_at) / (step - self.looked_after)
        common = torch.tensor([wish, seconds])
        all_reduce(common, op="max")
        wish, seconds = common.tolist()  # one wait for the device
        self._plan_look(step, seconds)
        return int(wish)

    def _plan_look(self, step: int, seconds: float) -> None:
        """Choose the step after which all processes look next, from the seconds that a step takes."""
        self.looked_after = step
        self.looked_at = time.monotonic()
        whole_interval = (step // self.interval + 1) * self.interval
        self.next_look = min(whole_interval, step + max(1, int(LOOK_SECONDS / seconds)))

    def _stop(self) -> None:
        """End with exit code 75. The signals stay taken: the one that came may be passed on again."""
        barrier()  # until the first process has written
        name = "another process's signal"
        if self.signal_received:
            name = signal.Signals(self.signal_received).name
        step = self.runner.iter + 1
        print_log(f"{name}: stopped after step {step}. Run the same command again to continue.", "current")
        self.workers.give_back()
        raise SystemExit(STOPPED)

    def _end_without_worker(self, error: RuntimeError) -> None:
        """Save, if there is a whole step, and end; PyTorch's loader catches all but a SystemExit."""
        line = worker_message(error)
        # While a validation lasts, EMAHook has exchanged the weights.
        is_averaged = any(isinstance(hook, EMAHook) for hook in self.runner.hooks)
        is_averaged = is_averaged and not self.runner.model.training
        if self.whole_step and is_main_process() and not is_averaged:
            self._save()
            line += f" Saved after step {self.whole_step['iter']}: run the same command again to continue."
        self.stop_listening()
        raise SystemExit(f"error: {line}") from error

    def _save(self) -> None:
        self.is_saving = True
        self.saved_at = time.monotonic()
        folder = _folder(self.runner)
        backend = None if "://" in folder else dict(backend=WHOLE_FILES)
        meta = dict(self.whole_step)
        self.runner.save_checkpoint(folder, LATEST, meta=meta, by_epoch=False, backend_args=backend)
        if is_main_process():
            record = Path(self.runner.work_dir, "last_checkpoint")
            replace_file(record, os.path.join(folder, LATEST).encode())
        self.is_saving = False


def _folder(runner: Runner) -> str:
    return getattr(checkpoint_hook(runner), "out_dir", runner.work_dir)


class KilledWorkers:
    """Lets a step end before a loader's worker that was killed does: PyTorch raises wherever Python is.

    Args:
        end: ends the run, by a SystemExit: PyTorch's loader catches all other errors.
    """

    def __init__(self, end: Callable[[RuntimeError], None]) -> None:
        self.end = end
        self.handler: Any = None  # PyTorch's of SIGCHLD, once a loader has workers
        self.in_step = False
        self.error: RuntimeError | None = None

    def begin_step(self) -> None:
        """Take SIGCHLD from PyTorch, in the main thread alone, where Python takes signals."""
        self.in_step = True
        handler = signal.getsignal(signal.SIGCHLD)
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and callable(handler) and handler != self._on_child:
            earlier = getattr(handler, "__self__", None)  # of a run that an error has ended
            self.handler = earlier.handler if isinstance(earlier, KilledWorkers) else handler
            signal.signal(signal.SIGCHLD, self._on_child)

    def end_step(self) -> None:
        """End the run if a worker was killed during the step."""
        self.in_step = False
        if self.error is not None:
            self._end()

    def give_back(self) -> None:
        """Let PyTorch have the signal again."""
        if self.handler is not None:
            signal.signal(signal.SIGCHLD, self.handler)

    def _on_child(self, number: int, frame: FrameType | None) -> None:
        """What PyTorch does when a worker is killed, but after the step."""
        try:
            self.handler(number, frame)
        except RuntimeError as error:
            self.error = error
            if not self.in_step:
                self._end()

    def _end(self) -> None:
        # When another worker ends, PyTorch would raise for this one again.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.end(self.error)
