"""Train models that are too large for one device: their states sharded over the processes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from mmengine._strategy import DDPStrategy
from mmengine.device import get_device
from mmengine.dist import broadcast, get_world_size, is_distributed, is_main_process
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mapet_mm.registry import STRATEGIES

SHARDED = ("state", "param_groups")  # the parts of an optimizer's state dict that are


@STRATEGIES.register_module()
class FullyShardedStrategy(DDPStrategy):
    """Data parallel with parameters, gradients and optimizer state sharded (PyTorch's `fully_shard`, FSDP2).

    For `runner_type="FlexibleRunner"`. Each process keeps its share of every parameter and gathers a layer
    only while it runs. Losses and gradients are those of plain data parallel; checkpoints hold the whole
    model under its usual names, so any recipe takes them. (MMEngine's own `FSDPStrategy` flattens parameters:
    gradient clipping and weight decay would go wrong.)

    Args:
        units: names of the model's module lists whose members are gathered one at a time.
        **kwargs: as for MMEngine's `DDPStrategy`.
    """

    def __init__(self, *, units: Sequence[str] = ("backbone.layers",), **kwargs: Any) -> None:
        self.units = (units,) if isinstance(units, str) else tuple(units)
        super().__init__(**kwargs)

    def _wrap_model(self, model: nn.Module) -> nn.Module:
        """Shard the model in place."""
        if not is_distributed():
            raise ValueError("strategy FullyShardedStrategy needs several processes: tools/dist_train.sh")
        model = self.convert_model(model.to(get_device()))
        for tensor in model.state_dict().values():  # each process has drawn its own
            broadcast(tensor)
        mesh = init_device_mesh(get_device(), (get_world_size(),))
        for layer in self._layers(model):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def _layers(self, model: nn.Module) -> list[nn.Module]:
        layers = []
        for name in self.units:
            try:
                layers.extend(model.get_submodule(name))
            except (AttributeError, TypeError):
                raise ValueError(
                    f"strategy.units: {type(model).__name__} has no list of modules `{name}`"
                ) from None
        return layers

    def save_checkpoint(self, filename: str, **kwargs: Any) -> None:
        """Save the whole model and optimizer; every process has to call it, the first one writes."""
        target = filename if is_main_process() else os.devnull
        super(DDPStrategy, self).save_checkpoint(target, **kwargs)

    def model_state_dict(self) -> dict:
        """The whole model's, in the first process's memory; empty in the others."""
        return get_model_state_dict(self.model, options=_gathered())

    def optim_state_dict(self) -> dict:
        """The optimizer wrapper's, the parameters by their names; in the first process's memory."""
        wrapper = self.optim_wrapper
        own = {key: value for key, value in wrapper.state_dict().items() if key not in SHARDED}
        return {**own, **get_optimizer_state_dict(self.model, wrapper.optimizer, options=_gathered())}

    def load_model_state_dict(
        self, state_dict: dict, *, strict: bool = False, revise_keys: Sequence[tuple] = ((r"^module\.", ""),)
    ) -> None:
        """Take each process's share of a whole model's."""
        for pattern, replacement in revise_keys:
            state_dict = {re.sub(pattern, replacement, name): value for name, value in state_dict.items()}
        options = StateDictOptions(full_state_dict=True, strict=strict)
        set_model_state_dict(self.model, state_dict, options=options)

    def load_optim_state_dict(self, state_dict: dict) -> None:
        """Take each process's share of a whole optimizer's, saved by this strategy."""
        wrapper = self.optim_wrapper
        whole = {key: state_dict[key] for key in SHARDED}
        if not all(isinstance(name, str) for group in whole["param_groups"] for name in group["params"]):
            raise ValueError(
                "the checkpoint's optimizer was saved without FullyShardedStrategy and cannot be shared out: "
                "take its weights only (`load_from` without `resume`)"
            )
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(self.model, wrapper.optimizer, whole, options=options)
        wrapper.load_state_dict({**state_dict, **wrapper.optimizer.state_dict()})


def _gathered() -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, cpu_offload=True)
