"""One live line for a whole training, in place of MMEngine's lines every few steps."""

from __future__ import annotations

import io
import logging
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from mmengine.dist import get_world_size, is_main_process
from mmengine.hooks import Hook
from mmengine.runner import Runner
from tqdm import tqdm

from mapet_mm.registry import HOOKS

SECONDS_BETWEEN_LINES = 60.0  # where there is no terminal
SECONDS_BETWEEN_LOSSES = 1.0


@HOOKS.register_module()
class ProgressHook(Hook):
    """Show epoch, step, loss, images/s and the time left: one live line, or a line a minute in a file.

    MMEngine's own lines of each interval stand in the log file only.
    """

    priority = "VERY_LOW"

    def before_train(self, runner: Runner) -> None:
        """Start the line at the step that the training starts from."""
        for handler in runner.logger.handlers:
            if not isinstance(handler, logging.FileHandler):
                handler.addFilter(self._make_room)
        self.is_live = sys.stderr.isatty()
        now = time.monotonic()
        self.loss_due = now
        self.due = now + SECONDS_BETWEEN_LINES
        # The images of a step; the last batch of an epoch may be smaller.
        loader = runner.train_dataloader
        per_epoch = min(len(loader) * loader.batch_size * get_world_size(), len(loader.dataset))
        per_step = per_epoch / len(loader)
        self.bar = tqdm(
            total=round(runner.max_iters * per_step),
            initial=round(runner.iter * per_step),
            unit=" images",
            unit_scale=True,
            dynamic_ncols=True,
            file=sys.stderr if self.is_live else io.StringIO(),
            mininterval=0.1 if self.is_live else math.inf,
            disable=not is_main_process(),
        )

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Mapping[str, Any], outputs: object = None
    ) -> None:
        """Renew the line."""
        if self.bar.disable:
            return
        step = runner.iter + 1
        now = time.monotonic()
        is_due = now >= self.due or step == runner.max_iters
        if now >= self.loss_due or is_due:  # to read it waits for the device
            self.loss = runner.message_hub.get_scalar("train/loss").current()
            self.loss_due = now + SECONDS_BETWEEN_LOSSES
        epoch = f"epoch {runner.epoch + 1}/{runner.max_epochs}, " if runner.max_epochs else ""
        self.bar.set_description_str(
            f"{epoch}step {step}/{runner.max_iters}, loss {self.loss:.3f}", refresh=False
        )
        self.bar.update(len(data_batch["data_samples"]) * get_world_size())
        if is_due and not self.is_live:
            print(self.bar, flush=True)
            self.due = now + SECONDS_BETWEEN_LINES

    def after_train(self, runner: Runner) -> None:
        """Leave the last line."""
        self.bar.close()

    def _make_room(self, record: logging.LogRecord) -> bool:
        """Clear the live line for a message; False for the messages that it replaces."""
        is_shown = not record.getMessage().startswith(("Epoch(train)", "Exp name"))
        if is_shown:
            self.bar.clear()
        return is_shown
