"""Mixed precision on the device that is there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.device import get_device
from mmengine.logging import print_log
from mmengine.optim import OptimWrapper
from torch import Tensor, nn

from mapet_mm.engine.hooks.late_log_hook import log_late
from mapet_mm.registry import OPTIM_WRAPPERS
from mapet_mm.utils.precision import choose_dtype


@OPTIM_WRAPPERS.register_module()
class AutocastOptimWrapper(OptimWrapper):
    """Optimizer wrapper with autocast: bfloat16 on devices that support it, else float16.

    CPUs that are not faster in bfloat16 stay with float32. float16 comes with loss scaling. MMEngine's
    `AmpOptimWrapper` works only on CUDA.

    Args:
        optimizer: the optimizer.
        dtype: 'bfloat16', 'float16' or 'float32' instead of the device's own.
        loss_scale: for float16: 'dynamic', a fixed scale, or the arguments of `torch.amp.GradScaler`.
        **kwargs: `accumulative_counts` and `clip_grad`, as for MMEngine's `OptimWrapper`. Gradients are
            clipped unscaled.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        dtype: str | None = None,
        loss_scale: str | float | dict = "dynamic",
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer, **kwargs)
        self.device_type = get_device()
        self.dtype = getattr(torch, dtype) if dtype else choose_dtype(self.device_type)
        self.fixed_scale = None
        options = loss_scale if isinstance(loss_scale, dict) else {}
        if not isinstance(loss_scale, dict) and loss_scale != "dynamic":
            self.fixed_scale = options["init_scale"] = float(loss_scale)
        enabled = self.dtype is torch.float16
        self.loss_scaler = torch.amp.GradScaler(self.device_type, enabled=enabled, **options)
        scaling = "loss scaling" if self.loss_scaler.is_enabled() else "no loss scaling"
        print_log(f"autocast: {self.dtype} on {self.device_type}, {scaling}", logger="current")

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Autocast around the forward pass, on top of `OptimWrapper`'s gradient accumulation."""
        enabled = self.dtype is not torch.float32
        with super().optim_context(model), torch.autocast(self.device_type, self.dtype, enabled=enabled):
            yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Back-propagate the (scaled) loss."""
        super().backward(self.loss_scaler.scale(loss), **kwargs)

    def step(self, **kwargs: Any) -> None:
        """Unscale, clip and update; a step with infinite gradients is left out and the scale lowered."""
        if self.clip_grad_kwargs:
            self.loss_scaler.unscale_(self.optimizer)
            clipped: list[nn.Parameter] = []
            for group in self.optimizer.param_groups:
                clipped += [parameter for parameter in group["params"] if parameter.grad is not None]
            norm = self.clip_func(clipped, **self.clip_grad_kwargs)
            if norm is not None:  # clipped by norm, not by value
                log_late(self.message_hub, f"train/{self.grad_name}", norm)
        self.loss_scaler.step(self.optimizer, **kwargs)
        self.loss_scaler.update(self.fixed_scale)

    def state_dict(self) -> dict:
        """The optimizer's state, with the scaler's under `loss_scaler` (empty without scaling)."""
        return {**super().state_dict(), "loss_scaler": self.loss_scaler.state_dict()}

    def load_state_dict(self, state_dict: dict) -> None:
        """Resume from a state of this wrapper, or of one without a scaler; the scaler then starts anew."""
        state_dict = dict(state_dict)
        scaler = state_dict.pop("loss_scaler", None)
        if scaler and self.loss_scaler.is_enabled():
            self.loss_scaler.load_state_dict(scaler)
        super().load_state_dict(state_dict)
