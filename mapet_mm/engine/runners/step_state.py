"""What a step changes besides weights and moments, kept so that a step can be taken back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from mmcv.cnn import Conv2d, Linear
from mmengine.optim import OptimWrapper, _ParamScheduler
from mmengine.runner import Runner
from torch import Tensor, nn

from mapet_mm.engine.model_parts import unwrapped

# Their own forward passes change no parameter; frozen ones (below LoRA) are large.
UNCHANGED = (nn.Linear, nn.Conv2d, Linear, Conv2d)


class ForwardState:
    """A copy of what forward passes may change in a model: running statistics, codebooks of moving averages.

    These are the buffers of the modules in training mode, and their parameters without gradient: all of a
    part of the model that does not learn (a teacher), of others all but those of linear layers and
    convolutions. They are few and small: a frozen network is in evaluation mode. Neither
    `_version` nor the tensors themselves tell what has changed: batch norms, and assignments to `.data`,
    leave the one as it is, and some modules make a new tensor.

    Args:
        model: in training mode, also within wrappers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.kept = [(module, name, _local(value).clone()) for module, name, value in _changeable(model)]

    @torch.no_grad()
    def restore(self, wanted: bool | Tensor) -> None:
        """Put the copies back if it is wanted, which a device may decide without anybody waiting for it."""
        if wanted is False:
            return
        for module, name, kept in self.kept:
            value = getattr(module, name, None)
            if value is not None and _local(value).shape == kept.shape:  # no cache for other sizes of images
                value = _local(value)
                value.copy_(kept if wanted is True else torch.where(wanted, kept, value))


def _changeable(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    # The dictionaries themselves, because this runs in each step: `named_buffers` takes much longer.
    parts = unwrapped(model)._modules.values()
    # A part of which nothing learns may be a teacher, whose layers all follow the network's.
    frozen = [part for part in parts if part is not None and part.training and not _learns(part)]
    teachers = {module for part in frozen if part._modules for module in part.modules()}
    for module in model.modules():
        if module.training:
            for name, value in module._buffers.items():
                if value is not None:
                    yield module, name, value
            changes = type(module) not in UNCHANGED or module in teachers
            for name, value in module._parameters.items() if changes else ():
                if value is not None and not value.requires_grad:
                    yield module, name, value


def _learns(part: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in part.parameters())


def _local(value: Tensor) -> Tensor:
    """This process's share of a sharded tensor; others as they are."""
    value = value.detach()
    return value.to_local() if hasattr(value, "to_local") else value


class ScheduleState:
    """Where schedules, rates and loss scales stand; nothing waits for the device.

    Args:
        runner: of a training, with its optimizers and schedules built.
    """

    def __init__(self, runner: Runner) -> None:
        self.schedules = [(one, one.state_dict()) for one in _schedules(runner)]
        groups = [group for one in wrappers_of(runner) for group in one.optimizer.param_groups]
        self.groups = [(group, {name: group[name] for name in group if name != "params"}) for group in groups]
        scalers = [getattr(one, "loss_scaler", None) for one in wrappers_of(runner)]
        scalers = [one for one in scalers if isinstance(one, torch.amp.GradScaler) and one.is_enabled()]
        self.scales = [(one, *_scale(one)) for one in scalers]

    def restore(self) -> None:
        """Go back to it."""
        for schedule, state in self.schedules:
            schedule.load_state_dict(state)
        for group, options in self.groups:
            group.update(options)
        for scaler, scale, since_growth in self.scales:
            state = dict(scale=float(scale), _growth_tracker=int(since_growth))
            scaler.load_state_dict(scaler.state_dict() | state)


def wrappers_of(runner: Runner) -> list[OptimWrapper]:
    """The runner's optimizer wrappers, however many."""
    wrapper = runner.optim_wrapper
    return list(wrapper.values()) if hasattr(wrapper, "values") else [wrapper]


def _schedules(runner: Runner) -> list[_ParamScheduler]:
    found = runner.param_schedulers or []
    return [one for each in found.values() for one in each] if isinstance(found, dict) else list(found)


def _scale(scaler: torch.amp.GradScaler) -> tuple[Tensor | float, Tensor | int]:
    """Its scale, and the steps since that grew: `state_dict` would wait for the device."""
    if scaler._scale is None:  # not used yet
        return scaler.get_scale(), scaler._get_growth_tracker()
    return scaler._scale.clone(), scaler._growth_tracker.clone()
