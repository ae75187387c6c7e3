"""Log what steps compute without waiting for it: values stay on their device until the log is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from mmengine.hooks import RuntimeInfoHook
from mmengine.logging import HistoryBuffer, MessageHub
from mmengine.runner import Runner
from torch import Tensor

from mapet_mm.registry import HOOKS

# Values that wait on the device at most: a log that nobody reads does not grow there.
MOST_WAITING = 1000


class LateHistory(HistoryBuffer):
    """MMEngine's history of a logged value, which copies what steps have computed when it is asked for.

    Each copy makes the host wait for the device, so there is one for all values since the last look instead
    of one for each step. What is logged is the same.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.waiting: list[Tensor] = []

    def note(self, value: Tensor) -> None:
        """Append a value, a tensor of one element, without waiting for it."""
        self.waiting.append(value.detach().reshape(()))
        if len(self.waiting) >= MOST_WAITING:
            self.read()

    def read(self) -> None:
        """Copy the waiting values to the host."""
        if self.waiting:
            values = torch.stack(self.waiting).tolist()
            self.waiting = []
            for value in values:
                super().update(value)

    def update(self, log_val: float, count: int = 1) -> None:
        """Append a number."""
        self.read()
        super().update(log_val, count)

    @property
    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """All values, and how many each stands for."""
        self.read()
        return super().data

    def statistics(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """A statistic by its name."""
        self.read()
        return super().statistics(method_name, *args, **kwargs)

    def mean(self, window_size: int | None = None) -> np.ndarray:
        """Mean of the last values."""
        self.read()
        return super().mean(window_size)

    def max(self, window_size: int | None = None) -> np.ndarray:
        """Largest of the last values."""
        self.read()
        return super().max(window_size)

    def min(self, window_size: int | None = None) -> np.ndarray:
        """Smallest of the last values."""
        self.read()
        return super().min(window_size)

    def current(self) -> np.ndarray:
        """The last value."""
        self.read()
        return super().current()

    def __getstate__(self) -> dict:
        self.read()
        return super().__getstate__()


def log_late(hub: MessageHub, name: str, value: Tensor | float) -> None:
    """`hub.update_scalar(name, value)` without waiting for the value's device."""
    if not isinstance(value, Tensor):
        hub.update_scalar(name, value)
        return
    history = hub.log_scalars.get(name)
    if not isinstance(history, LateHistory):
        history = LateHistory(*(([], []) if history is None else history.data))
        hub.log_scalars[name] = history
    history.note(value)


@HOOKS.register_module()
class LateLogHook(RuntimeInfoHook):
    """MMEngine's `RuntimeInfoHook`, which leaves each step's losses on their device until the log is written.

    MMEngine's own copies each value in each step, and the host waits for the device each time. The log has
    the same values. For `default_hooks.runtime_info`.
    """

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Note what the model returned for the log."""
        for key, value in (outputs or {}).items():
            log_late(runner.message_hub, f"train/{key}", value)
