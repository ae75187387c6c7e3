"""Log a step's losses without waiting for them."""

from __future__ import annotations

from typing import Any

from mmengine.hooks import RuntimeInfoHook
from mmengine.runner import Runner

from mapet_mm.registry import HOOKS
from mapet_mm.utils.late_log import log_late


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
