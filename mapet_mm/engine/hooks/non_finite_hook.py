"""Steps whose gradients are not finite: left out, counted, and too many in a row end the run."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.optim import OptimWrapperDict
from mmengine.runner import Runner
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from mapet_mm.registry import HOOKS
from mapet_mm.utils.atomic_files import replace_json
from mapet_mm.utils.errors import UserError, listed


class NonFiniteError(UserError):
    """Too many steps in a row had a loss or gradients that are not finite."""


@HOOKS.register_module()
class NonFiniteHook(Hook):
    """Leave out steps whose gradients are not finite, and end the run after many bad steps in a row.

    A step that is left out changes no weights and no moments; schedules go on. A loss that is not finite
    counts as a bad step, too, because a float16 run's GradScaler leaves such steps out itself.

    Args:
        patience: how many bad steps in a row end the run.

    Raises:
        NonFiniteError: with the images, which `non_finite_<process>.json` in the work dir lists.
    """

    def __init__(self, patience: int = 20) -> None:
        self.patience = patience
        self.left_out = self.in_a_row = 0
        self.stepped = self.bad = False
        self.images: deque[list[str]] = deque(maxlen=patience)

    def before_train(self, runner: Runner) -> None:
        """Look at the gradients before each step of an optimizer."""
        wrapper = runner.optim_wrapper
        for one in wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]:
            one.optimizer.register_step_pre_hook(self._check_gradients)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Note the paths of the batch's images."""
        self.stepped = self.bad = False
        samples = data_batch.get("data_samples") if isinstance(data_batch, dict) else None
        self.images.append([str(sample.get("img_path", "no path")) for sample in samples or ()])

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Count a bad step, and end the run after too many."""
        loss = torch.as_tensor((outputs or {}).get("loss", 0.0)).detach()
        if not self.bad and torch.isfinite(loss).all():
            if self.stepped:
                self.in_a_row = 0
                self.images.clear()
            return
        self.left_out += self.bad
        self.in_a_row += 1
        line = f"{self.in_a_row} steps in a row, up to step {runner.iter + 1}, had no finite loss or gradient"
        MMLogger.get_current_instance().warning(f"{line} (the run ends after {self.patience})")
        runner.message_hub.update_info("steps_left_out", self.left_out)
        if self.in_a_row >= self.patience:
            path = Path(runner.work_dir, f"non_finite_{get_rank()}.json")
            replace_json(path, {"last_step": runner.iter + 1, "images": list(self.images)})
            raise NonFiniteError(
                f"{line}; images of the first: {listed(self.images[0], most=3)} (all in {path}): lower the "
                "rate, clip gradients (`optim_wrapper.clip_grad`), or look at these images"
            )

    def _check_gradients(self, optimizer: Optimizer, *_: Any) -> None:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        norm = get_total_norm([one.grad for one in parameters if one.grad is not None])
        self.stepped = True
        if not norm.isfinite():
            self.bad = True
            optimizer.zero_grad()  # without gradients, an optimizer changes neither weights nor moments
