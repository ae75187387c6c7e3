"""Steps whose gradients are not finite: left out, counted, and too many in a row end the run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.optim import OptimWrapperDict
from mmengine.runner import Runner
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from mapet_mm.registry import HOOKS
from mapet_mm.utils.atomic_files import replace_json
from mapet_mm.utils.dist import unwrapped
from mapet_mm.utils.errors import UserError, listed


class NonFiniteError(UserError):
    """Too many steps in a row had a loss or gradients that are not finite, or the weights are not."""


@dataclass
class Step:
    """What a step has computed; the tensors are on the device, and nobody has waited for them."""

    number: int  # from 1
    images: list[str]
    norms: list[Tensor] = field(default_factory=list)  # of the gradients, for each optimizer that stepped
    losses: list[Tensor] = field(default_factory=list)


@HOOKS.register_module()
class NonFiniteHook(Hook):
    """Leave out steps whose gradients are not finite, and end the run after many bad steps in a row.

    A step that is left out changes no weights and no moments; schedules go on. A loss that is not finite
    counts as a bad step, too, because a float16 run's GradScaler leaves such steps out itself.

    A fused optimizer leaves the step out on its device. The host looks at the last steps together, every
    `interval` steps and before a checkpoint is written; other optimizers wait for the device in each step. A
    checkpoint with weights that are not finite is refused.

    Args:
        patience: how many bad steps in a row end the run.
        interval: steps between two looks.

    Raises:
        NonFiniteError: with the images, which `non_finite_<process>.json` in the work dir lists; or weights
            are not finite when a checkpoint is to be written.
    """

    def __init__(self, patience: int = 20, interval: int = 10) -> None:
        self.patience = patience
        self.interval = interval
        self.left_out = self.in_a_row = 0
        self.images: deque[list[str]] = deque(maxlen=patience)  # of the bad steps
        self.step = Step(0, [])
        self.unseen: list[Step] = []

    def before_train(self, runner: Runner) -> None:
        """Look at the gradients before each step of an optimizer."""
        wrappers = [runner.optim_wrapper]
        if isinstance(runner.optim_wrapper, OptimWrapperDict):
            wrappers = runner.optim_wrapper.values()
        for wrapper in wrappers:
            wrapper.optimizer.register_step_pre_hook(self._check_gradients)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Note the paths of the batch's images."""
        samples = data_batch.get("data_samples") if isinstance(data_batch, dict) else None
        images = [str(sample.get("img_path", "no path")) for sample in samples or ()]
        self.step = Step(runner.iter + 1, images)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Note the loss, and look at the last steps if it is time."""
        loss = (outputs or {}).get("loss")
        if isinstance(loss, Tensor):
            self.step.losses.append(loss.detach())
        self.unseen.append(self.step)
        if len(self.unseen) >= self.interval:
            self.look(runner)

    def after_train(self, runner: Runner) -> None:
        """Look at the last steps."""
        self.look(runner)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Look at the last steps, and refuse weights that are not finite."""
        self.look(runner)
        weights = dict(unwrapped(runner.model).named_parameters())
        if weights and not get_total_norm(list(weights.values())).isfinite():
            bad = [name for name, weight in weights.items() if not weight.isfinite().all()]
            raise NonFiniteError(
                f"{listed(bad, most=3)} have weights that are not finite after step {runner.iter + 1}: no "
                "checkpoint is written. Go on from the last one with a lower rate"
            )

    def look(self, runner: Runner) -> None:
        """Count the bad steps since the last look, and end the run after too many in a row."""
        steps = self.unseen
        self.unseen = []
        values: list[Tensor] = []
        for step in steps:
            values += [value.float() for value in (*step.norms, *step.losses)]
        are_finite: list[bool] = []
        if values:
            are_finite = torch.stack(values).isfinite().tolist()  # the only wait
        for step in steps:
            num_norms = len(step.norms)
            num_values = num_norms + len(step.losses)
            self._count(runner, step, all(are_finite[:num_norms]), all(are_finite[num_norms:num_values]))
            are_finite = are_finite[num_values:]  # of the steps after it

    def _count(self, runner: Runner, step: Step, gradients_are_finite: bool, loss_is_finite: bool) -> None:
        self.images.append(step.images)
        if gradients_are_finite and loss_is_finite:
            if step.norms:  # the step of an optimizer; before it, batches are summed up
                self.in_a_row = 0
                self.images.clear()
            return
        self.left_out += not gradients_are_finite
        self.in_a_row += 1
        line = f"{self.in_a_row} steps in a row, up to step {step.number}, had no finite loss or gradient"
        MMLogger.get_current_instance().warning(f"{line} (the run ends after {self.patience})")
        runner.message_hub.update_info("steps_left_out", self.left_out)
        if self.in_a_row >= self.patience:
            path = Path(runner.work_dir, f"non_finite_{get_rank()}.json")
            replace_json(path, {"last_step": step.number, "images": list(self.images)})
            raise NonFiniteError(
                f"{line}; images of the first: {listed(self.images[0], most=3)} (all in {path}): lower the "
                "rate, clip gradients (`optim_wrapper.clip_grad`), or look at these images"
            )

    def _check_gradients(self, optimizer: Optimizer, *_: Any) -> None:
        gradients: list[Tensor] = []
        for group in optimizer.param_groups:
            gradients += [one.grad for one in group["params"] if one.grad is not None]
        if not gradients:
            return
        norm = get_total_norm(gradients)
        self.step.norms.append(norm)
        if skips_on_device(optimizer):
            optimizer.found_inf = (~norm.isfinite()).float()
        elif not norm.isfinite():
            optimizer.zero_grad()  # without gradients, an optimizer changes neither weights nor moments


def skips_on_device(optimizer: Optimizer) -> bool:
    """True if the optimizer's kernel changes nothing where the optimizer's `found_inf` is 1.

    That is how PyTorch's GradScaler has fused optimizers leave a step out.
    """
    reads_found_inf = getattr(optimizer, "_step_supports_amp_scaling", False)
    return reads_found_inf and all(group.get("fused") for group in optimizer.param_groups)
