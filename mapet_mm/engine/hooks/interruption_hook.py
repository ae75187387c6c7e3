"""Checkpoints within an epoch: every so many minutes, and when the run is told to end."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import torch
from mmengine.dist import is_distributed, is_main_process
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.runner import Runner
from torch import distributed

from mapet_mm.engine.hooks.portable_checkpoint_hook import checkpoint_hook, whole_files
from mapet_mm.engine.hooks.stuck_loader_hook import runs_in
from mapet_mm.registry import HOOKS
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.errors import STOPPED

LATEST = "latest.pth"
NOTHING, SAVE, STOP = range(3)
# A loader's worker that is told to end looks so often whether its run is still there, which needs its images.
WORKER_SECONDS = 30


@HOOKS.register_module()
class InterruptionHook(Hook):
    """Write `latest.pth` every few minutes, and at a signal, after which the run ends with exit code 75.

    The same command then resumes with the next batch. Slurm sends SIGUSR1 before a job reaches its time limit
    (`--signal`), and SIGTERM when it takes the machine for another job. All processes of a run save after the
    same step, whichever of them got the signal. A signal during validation takes effect after it.

    Args:
        minutes: between two checkpoints; None writes one only at a signal.
        signals: names of the signals.
    """

    priority = "LOWEST"  # after CheckpointHook, whose checkpoint may be of the same step

    def __init__(self, minutes: float | None = 30, signals: Sequence[str] = ("SIGUSR1", "SIGTERM")) -> None:
        self.minutes = minutes
        self.signals = [getattr(signal, name) for name in signals]
        self.told: int | None = None
        self._before: dict[int, object] = {}
        self._asked: tuple[torch.Tensor, distributed.Work] | None = None

    def before_train(self, runner: Runner) -> None:
        """Listen to the signals."""
        self.process, self.loop, self.saved = os.getpid(), runner.train_loop, time.monotonic()
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._tell) for number in self.signals}
        loader = runner.train_dataloader
        if loader.num_workers:
            loader.worker_init_fn = _PatientWorker(loader.worker_init_fn, self.signals)
        # Nobody waits for a GPU: the processes agree beside it.
        nccl = is_distributed() and distributed.get_backend() != "gloo"
        self.group = distributed.new_group(backend="gloo") if nccl else None

    def after_train_iter(self, runner: Runner, *args: object, **kwargs: object) -> None:
        """Save if it is time, and end if any process was told to."""
        due = self.minutes is not None and time.monotonic() - self.saved > 60 * self.minutes
        what = self._agree(STOP if self.told else SAVE if due else NOTHING)
        if what == NOTHING:
            return
        self._save(runner)
        if what == STOP:
            if is_distributed():
                distributed.barrier(self.group)  # the first process has written
            name = signal.Signals(self.told).name if self.told else "another process's signal"
            print_log(f"{name}: stopped after step {runner.iter + 1}; the same command goes on", "current")
            self._restore()
            raise SystemExit(STOPPED)

    def after_train(self, runner: Runner) -> None:
        """Leave the signals as they were, and no checkpoint of before the end."""
        self._restore()
        if self._asked is not None:
            self._asked[1].wait()
        record = Path(runner.work_dir, "last_checkpoint")
        if is_main_process() and record.is_file() and Path(record.read_text()).name != LATEST:
            Path(self._folder(runner), LATEST).unlink(missing_ok=True)

    def _tell(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self.process and runs_in(self.loop, frame):
            self.told = number
        elif not _is_loaders_worker():  # it has ended with an error, or this is a fork of its process
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _agree(self, wish: int) -> int:
        """The largest wish of all processes: of this step, or of the one before if there are several."""
        if not is_distributed():
            return wish
        agreed = NOTHING
        if self._asked is not None:
            wishes, work = self._asked
            work.wait()
            agreed = int(wishes)
        wishes = torch.tensor([wish if agreed == NOTHING else NOTHING])
        operation = distributed.ReduceOp.MAX
        self._asked = wishes, distributed.all_reduce(wishes, operation, self.group, async_op=True)
        return agreed

    def _save(self, runner: Runner) -> None:
        self.saved = time.monotonic()
        hook, folder, step = checkpoint_hook(runner), self._folder(runner), runner.iter + 1
        if hook is not None and not hook.by_epoch and str(hook.last_ckpt).endswith(f"_{step}.pth"):
            return  # it has just done so
        meta = dict(epoch=runner.epoch, iter=step)
        backend = getattr(hook, "backend_args", None) or whole_files(folder)
        runner.save_checkpoint(folder, LATEST, meta=meta, by_epoch=False, backend_args=backend)
        if is_main_process():
            replace_file(Path(runner.work_dir, "last_checkpoint"), os.path.join(folder, LATEST).encode())

    def _folder(self, runner: Runner) -> str:
        return getattr(checkpoint_hook(runner), "out_dir", runner.work_dir)


class _PatientWorker:
    """Starts a loader's worker, which then outlives the signals that go to all processes of a job.

    PyTorch's workers end at SIGTERM, and the run with them, before it has saved. These end with their run.

    Args:
        start: what else is called in a worker.
        signals: their numbers.
    """

    def __init__(self, start: Callable[[int], None] | None, signals: Sequence[int]) -> None:
        self.start, self.signals = start, signals
        self.closing = multiprocessing.Value("b", 0, lock=False)
        atexit.register(self._close)

    def __call__(self, worker: int) -> None:
        if self.start is not None:
            self.start(worker)
        for number in (*self.signals, signal.SIGALRM):
            signal.signal(number, self._wait)

    def _close(self) -> None:
        self.closing.value = 1

    def _wait(self, number: int, frame: FrameType | None) -> None:
        run = multiprocessing.parent_process()
        if self.closing.value or not (run and run.is_alive()):  # it is the run itself that ends
            os._exit(0)
        signal.alarm(WORKER_SECONDS)


def _is_loaders_worker() -> bool:
    """Whether this process is a loader's worker, which a signal may reach before `_PatientWorker` does."""
    target = getattr(multiprocessing.current_process(), "_target", None)
    return getattr(target, "__module__", "").startswith("torch.utils.data")
