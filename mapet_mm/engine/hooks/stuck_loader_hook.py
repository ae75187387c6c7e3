"""A loader that hangs ends its run, with a line, instead of keeping all processes waiting."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from mmengine.dist import get_dist_info
from mmengine.hooks import Hook
from mmengine.runner import BaseLoop, EpochBasedTrainLoop, Runner

from mapet_mm.registry import HOOKS


@HOOKS.register_module()
class StuckLoaderHook(Hook):
    """End the process if no batch arrives for a while; the run's other processes would wait for hours.

    The message names the process and where it hangs. torchrun or Slurm then ends the others.

    Args:
        seconds: how long a batch may take, also one that a resumed run only passes over; time in which the
            process was stopped does not count.
    """

    priority = "LOWEST"

    def __init__(self, seconds: float = 50) -> None:
        if seconds <= 0:
            raise ValueError(f"StuckLoaderHook's seconds={seconds} must be above 0")
        self.seconds = seconds
        self._since: float | None = None
        self._loop: BaseLoop | None = None
        self._thread: int | None = None
        self._ended = threading.Event()

    def before_train(self, runner: Runner) -> None:
        """Begin to watch."""
        self._ended.clear()
        self._loop, self._thread = runner.train_loop, threading.get_ident()
        threading.Thread(target=self._watch, args=(get_dist_info(),), daemon=True).start()

    def before_train_epoch(self, runner: Runner) -> None:
        """A batch is waited for."""
        self._since = time.monotonic()

    def before_train_iter(self, runner: Runner, *args: object, **kwargs: object) -> None:
        """It has come."""
        self._since = None

    def after_train_iter(self, runner: Runner, *args: object, **kwargs: object) -> None:
        """The next one is waited for, but at the end of an epoch, where checkpoints are written."""
        by_epoch = isinstance(runner.train_loop, EpochBasedTrainLoop)
        last = by_epoch and (runner.iter + 1) % len(runner.train_dataloader) == 0
        self._since = None if last else time.monotonic()

    def before_val(self, runner: Runner) -> None:
        """Nothing is waited for."""
        self._since = None

    def after_val(self, runner: Runner) -> None:
        """The next batch is waited for, if there is one."""
        self._since = None if isinstance(runner.train_loop, EpochBasedTrainLoop) else time.monotonic()

    def after_train(self, runner: Runner) -> None:
        """Stop watching."""
        self._since = None
        self._ended.set()

    def _watch(self, process: tuple[int, int]) -> None:
        tick = min(1, self.seconds / 4)
        seen, waited, before = None, 0.0, time.monotonic()
        while not self._ended.wait(tick):
            # A process that was stopped, with a suspended job, has not waited meanwhile.
            passed, before = min(time.monotonic() - before, 2 * tick), time.monotonic()
            arrived = self._arrived()
            waits = self._since is not None and seen == arrived and not in_a_hook(self._frame())
            waited = waited + passed if waits else 0.0
            seen = arrived
            if waited > self.seconds:
                if not self._trains():
                    return
                print(
                    f"error: process {process[0]} of {process[1]}: no batch has come for {self.seconds:g} s: "
                    "the loader hangs (a file system? a transform?); its stack follows. "
                    "`default_hooks.stuck_loader.seconds` allows it more time",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback()
                os._exit(1)

    def _arrived(self) -> tuple[float | None, int | None, int | None]:
        """What differs after each batch, also after one that a resumed run of iterations passes over."""
        batches = getattr(self._loop, "dataloader_iterator", None)
        within = getattr(getattr(batches, "_iterator", None), "_num_yielded", None)
        return self._since, getattr(batches, "_epoch", None), within

    def _trains(self) -> bool:
        """Whether the training still runs, and has not ended with an error that somebody has caught."""
        return runs_in(self._loop, self._frame())

    def _frame(self) -> FrameType | None:
        """Where the training stands now."""
        return sys._current_frames().get(self._thread)


def in_a_hook(frame: FrameType | None) -> bool:
    """Whether a frame, or one that has called it, is of a hook, which may take its time."""
    return any(isinstance(one, Hook) for one in _owners(frame))


def runs_in(loop: BaseLoop, frame: FrameType | None) -> bool:
    """Whether a frame, or one that has called it, is of a method of the loop."""
    return any(one is loop for one in _owners(frame))


def _owners(frame: FrameType | None) -> Iterator[Any]:
    """The objects whose methods a frame, and those that have called it, are of; None for functions."""
    while frame is not None:
        yield frame.f_locals.get("self")
        frame = frame.f_back
