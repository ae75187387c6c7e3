"""Say when a training waits for its images."""

from __future__ import annotations

import time

from mmengine.hooks import Hook
from mmengine.runner import Runner

from mapet_mm.registry import HOOKS


@HOOKS.register_module()
class LoaderWaitHook(Hook):
    """Log one line, once, if steps wait for images for more than a share of the last minute.

    The model then trains more slowly than it could. The first step of an epoch, which waits for the loader to
    start, does not count, nor does a validation or what hooks do between steps. Nothing is read from the
    device.

    Args:
        share: of the time, from 0 to 1, that steps may wait without a word.
        seconds: length of the time that is looked at.
    """

    # The last to see a step's end: MMEngine's `data_time` also counts the checkpoints saved between steps.
    priority = "LOWEST"

    def __init__(self, share: float = 0.2, seconds: float = 60.0) -> None:
        self.share = share
        self.seconds = seconds
        self.is_said = False
        self.waited = self.worked = 0.0

    def before_train_epoch(self, runner: Runner) -> None:
        """Leave the time before the epoch out; a loop of iterations has one epoch."""
        self.end: float | None = None

    def after_val(self, runner: Runner) -> None:
        """Leave a validation out, which a loop of iterations makes between two steps."""
        self.end = None

    def before_train_iter(self, runner: Runner, *args: object, **kwargs: object) -> None:
        """Count the time since the last step as waiting."""
        self.begin = time.monotonic()
        if self.end is not None:
            self.waited += self.begin - self.end

    def after_train_iter(self, runner: Runner, *args: object, **kwargs: object) -> None:
        """Count the step's time; at the end of each minute, compare."""
        self.end = time.monotonic()
        self.worked += self.end - self.begin
        total = self.waited + self.worked
        if self.is_said or total < self.seconds:
            return
        share = self.waited / total
        if share > self.share:
            self.is_said = True
            workers = runner.train_dataloader.num_workers
            runner.logger.warning(
                f"{100 * share:.0f} % of the last {total:.0f} s went by in waiting for images, the model "
                f"could train faster: raise `train_dataloader.num_workers` (now {workers} for each process) "
                "while the machine has free cores, or decode each image once and jitter colours on the GPU, "
                "as the `-stored` recipes do (docs/performance.md)"
            )
        self.waited = self.worked = 0.0
