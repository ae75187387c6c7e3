"""Steps whose loss or gradients are not finite: left out, counted, and too many in a row end the run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import all_gather_object, is_main_process
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.optim import OptimWrapper
from mmengine.runner import EpochBasedTrainLoop, Runner
from torch import Tensor, nn

from mapet_mm.engine.hooks.portable_checkpoint_hook import whole_files
from mapet_mm.engine.model_parts import unwrapped
from mapet_mm.engine.runners.step_state import ForwardState, ScheduleState, wrappers_of
from mapet_mm.registry import HOOKS
from mapet_mm.utils.atomic_files import replace_json
from mapet_mm.utils.errors import UserError, listed

STATE, IMAGES = "non_finite.pth", "non_finite.json"


class NonFiniteError(UserError):
    """Too many steps in a row had a loss or gradients that are not finite."""


@dataclass
class Batch:
    """What is remembered of a batch: its step, its images, where schedules stood, and its losses."""

    step: int
    samples: Sequence[Any] | None
    schedules: ScheduleState
    losses: Sequence[Tensor] = ()


@HOOKS.register_module()
class NonFiniteHook(Hook):
    """Leave out steps whose loss or gradients are not finite, and end the run after many in a row.

    A step that is left out changes no weights, no moments and none of what the forward pass changes in the
    model (batch statistics, codebooks of moving averages), of all batches whose gradients are summed up for
    it. Schedules go on.

    All processes leave out the same steps; if there are several optimizers, only those with bad gradients do.
    With gradient clipping, the hook looks at the norm that is computed anyway; without it, a fused optimizer
    decides on the device and is asked every few steps. Neither waits for the device more often than before;
    other optimizers do.

    A run that ends in this way leaves `non_finite.pth`, from which `--resume` repeats the first of these
    steps at its rate, and `non_finite.json`, which lists its images. Averages of weights (MMEngine's
    `EMAHook`) are in it as they were at the end.

    Args:
        patience: how many steps in a row are left out before the run ends. A float16 run leaves out a few
            while it looks for its loss scale.
        interval: steps between two looks at what a device has counted.

    Raises:
        NonFiniteError: with the step, its images, and how to do it again.
    """

    priority = "ABOVE_NORMAL"  # before EMAHook averages the model's buffers

    def __init__(self, patience: int = 20, interval: int = 10) -> None:
        if min(patience, interval) < 1:
            raise ValueError(f"NonFiniteHook's patience={patience} and interval={interval} must be 1 or more")
        self.patience, self.interval = patience, interval
        self.left_out: int | Tensor = 0  # on the device, where it decides
        self.in_a_row: int | Tensor = 0
        self.reported = 0
        self.bad: bool | Tensor | None = None  # of this step; None while no optimizer was asked to take it
        # Batches that wrappers with a scaler had before this step, until they ask their optimizer.
        self.silent: dict[OptimWrapper, int] = {}
        self.pending = 0  # batches that are summed up for a step that is not decided yet
        self.before: ForwardState | None = None  # the model's, before the first of them
        self.ended_at: dict[str, int] = {}  # of a run that ends: where it is to go on

    def before_train(self, runner: Runner) -> None:
        """Watch the losses and the optimizers."""
        self.watching = unwrapped(runner.model).register_forward_hook(self._watch_losses)
        for wrapper in wrappers_of(runner):
            if not hasattr(wrapper.optimizer, "register_step_pre_hook"):
                kind = type(wrapper.optimizer).__name__
                MMLogger.get_current_instance().warning(
                    f"NonFiniteHook: {kind} is no optimizer of PyTorch and is not watched"
                )
                continue
            wrapper.optimizer.register_step_pre_hook(
                lambda optimizer, *_, wrapper=wrapper: self._look(wrapper, optimizer)
            )
        self.accumulated = max(getattr(one, "_accumulative_counts", 1) for one in wrappers_of(runner))
        # Beyond what may have happened until the next look.
        self.batches: deque[Batch] = deque(maxlen=self.accumulated * (self.patience + self.interval + 1))

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Keep who is in the batch, without the images, and what a step may change."""
        samples = data_batch.get("data_samples") if isinstance(data_batch, Mapping) else None
        self.batches.append(Batch(runner.iter, samples, ScheduleState(runner)))
        if not self.pending:
            self.before = ForwardState(runner.model)
        self.bad = None
        self.silent = {wrapper: wrapper.inner_count for wrapper in wrappers_of(runner) if _scaled(wrapper)}

    def after_train_iter(self, runner: Runner, *args: object, **kwargs: object) -> None:
        """Say what was left out, and end the run if that does not stop."""
        if any(one.inner_count > before and one.should_update() for one, before in self.silent.items()):
            self.bad = True  # the loss scaler has left it out
        self.pending += 1
        if self.bad is not None:
            self.before.restore(self.bad)
            self.before, self.pending = None, 0
            self.left_out = self.left_out + self.bad
            self.in_a_row = (self.in_a_row + self.bad) * self.bad
        on_device = isinstance(self.left_out, Tensor)
        if on_device and not self.every_n_train_iters(runner, self.interval):
            return
        left_out, in_a_row = int(self.left_out), int(self.in_a_row)
        if left_out > self.reported:
            self.reported = left_out
            MMLogger.get_current_instance().warning(
                f"step {runner.iter + 1}: loss or gradients were not finite, {left_out} steps left out so "
                f"far, {in_a_row} in a row (the run ends after {self.patience})"
            )
        runner.message_hub.update_info("steps_left_out", left_out)
        if in_a_row >= self.patience:
            self._end(runner, in_a_row)

    def after_train(self, runner: Runner) -> None:
        """Leave the model without a reference to optimizers and schedules, which cannot be pickled."""
        self.watching.remove()

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Say where a run that ends is to go on; MMEngine's runner with strategies lets no caller say it."""
        checkpoint["meta"].update(self.ended_at)

    def _watch_losses(self, model: nn.Module, inputs: tuple, output: Any) -> Any:
        """Make the gradients of a loss that is not finite not finite either: then all processes see it."""
        if not (model.training and isinstance(output, dict)):
            return None
        losses = {name: value for name, value in output.items() if "loss" in name}
        if self.batches:
            self.batches[-1].losses = [one.detach() for one in _tensors(losses)]
        return {**output, **_apply(losses)}

    def _look(self, wrapper: OptimWrapper, optimizer: torch.optim.Optimizer) -> None:
        """Before a step of an optimizer: have it left out if gradients are not finite."""
        self.silent.pop(wrapper, None)
        bad = self._decide(wrapper, optimizer)
        self.bad = bad if self.bad is None else self.bad | bad

    @staticmethod
    def _decide(wrapper: OptimWrapper, optimizer: torch.optim.Optimizer) -> bool | Tensor:
        """Whether gradients are not finite; then the optimizer leaves its step out."""
        by_scaler = getattr(optimizer, "found_inf", None)
        if by_scaler is not None and getattr(optimizer, "grad_scale", None) is not None:
            return by_scaler.bool().any()
        gradients = [value.grad for value in _parameters(optimizer) if value.grad is not None]
        if wrapper.clip_grad_kwargs and wrapper.grad_name == "grad_norm":
            bad = not math.isfinite(wrapper.message_hub.get_scalar("train/grad_norm").current())
        else:
            norm = nn.utils.get_total_norm(gradients)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            bad = ~norm.isfinite()
            if optimizer.defaults.get("fused"):
                optimizer.found_inf = bad.float()
                return bad
        if bad:
            for value in _parameters(optimizer):  # without a gradient nothing of it is touched
                value.grad = None
        return bool(bad)

    def _end(self, runner: Runner, in_a_row: int) -> None:
        decided = list(self.batches)[: len(self.batches) - self.pending]
        wanted = decided[-in_a_row * self.accumulated :]
        first = wanted[0].step
        length = len(runner.train_dataloader)
        by_epoch = isinstance(runner.train_loop, EpochBasedTrainLoop)
        self.ended_at = dict(iter=first, epoch=first // length if by_epoch else runner.epoch)
        # Then all is as the first of these steps began: weights and moments have not changed since.
        wanted[0].schedules.restore()
        if self.before is not None:
            self.before.restore(True)
        runner.save_checkpoint(
            runner.work_dir, STATE, by_epoch=False, backend_args=whole_files(runner.work_dir)
        )
        self.ended_at = {}  # of this checkpoint only
        guilty = [names(batch.samples) for batch in wanted if not _finite(batch.losses)]
        found = all_gather_object((guilty[:1], names(wanted[0].samples)))
        images = [name for batches, _ in found for batch in batches for name in batch]
        images = images or [name for _, batch in found for name in batch]
        if is_main_process():
            replace_json(Path(runner.work_dir, IMAGES), {"step": first + 1, "images": images})
        raise NonFiniteError(
            f"{in_a_row} steps in a row, from step {first + 1} on, had a loss or gradients that are not "
            f"finite; images of the first: {listed(images, most=3)} (all in {runner.work_dir}/{IMAGES}): "
            f"`--resume {runner.work_dir}/{STATE}` does it again; lower the learning rate, clip gradients "
            "(`optim_wrapper.clip_grad`), or look at these images"
        )


def names(samples: Sequence[Any] | None) -> list[str]:
    """Paths of a batch's images, as far as its samples know them."""
    return [str(sample.get("img_path", "an image without a path")) for sample in samples or ()]


def _scaled(wrapper: OptimWrapper) -> bool:
    """Whether something scales its loss, and leaves out steps on its own: a GradScaler or Apex."""
    return getattr(wrapper, "loss_scaler", None) is not None or hasattr(wrapper.optimizer, "_amp_stash")


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _tensors(losses: Mapping[str, Any]) -> list[Tensor]:
    parts = [value if isinstance(value, list | tuple) else [value] for value in losses.values()]
    return [one for part in parts for one in part if isinstance(one, Tensor)]


def _apply(losses: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: [_spread(one) for one in value] if isinstance(value, list | tuple) else _spread(value)
        for name, value in losses.items()
    }


def _spread(loss: Any) -> Any:
    """The same number to the bit if it is finite; otherwise not a number, and so are its gradients."""
    return loss * (1 + 0 * loss.detach()) if isinstance(loss, Tensor) else loss


def _finite(losses: Sequence[Tensor]) -> bool:
    return all(bool(one.isfinite().all()) for one in losses)
