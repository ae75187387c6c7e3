"""Training of models that are too large for one device: their states sharded over the processes."""

from __future__ import annotations

import copy
import os
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
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from mapet_mm.registry import STRATEGIES

SHARDED = ("state", "param_groups")  # parts of an optimizer's state dict
GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)


@STRATEGIES.register_module()
class FullyShardedStrategy(DDPStrategy):
    """Data parallel with parameters, gradients and optimizer state sharded (PyTorch's `fully_shard`, FSDP2).

    For `runner_type="FlexibleRunner"`. Each process keeps its share of every parameter and gathers a layer
    only while it runs. Losses and gradients equal plain data parallel training's, and checkpoints hold
    the whole model under its usual names. The first process keeps an unsharded copy in the host's memory:
    checkpoints are loaded into it, as into any model, and then shared out. (MMEngine's own `FSDPStrategy`
    flattens parameters, so weight decay goes wrong, and clips gradients by the norm of each process's share.)

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
        model = self.convert_model(model)
        for tensor in model.state_dict().values():  # each process has drawn its own
            broadcast(tensor)
        self.host = copy.deepcopy(model) if is_main_process() else None
        mesh = init_device_mesh(get_device(), (get_world_size(),))
        for layer in (layer for name in self.units for layer in model.get_submodule(name)):
            fully_shard(layer, mesh=mesh)
        # Sharding has moved all tensors; the data preprocessor still has to know the device.
        model = fully_shard(model, mesh=mesh).to(get_device())
        if hasattr(model, "extract_feat"):  # called by hooks beside `forward`
            register_fsdp_forward_method(model, "extract_feat")
        return model

    def save_checkpoint(self, filename: str, **kwargs: Any) -> None:
        """Save the whole model and optimizer; every process has to call it, the first one writes."""
        target = filename if is_main_process() else os.devnull
        super(DDPStrategy, self).save_checkpoint(target, **kwargs)

    def model_state_dict(self) -> dict:
        """The whole model's, in the first process's memory; empty in the others."""
        return get_model_state_dict(self.model, options=GATHERED)

    def optim_state_dict(self) -> dict:
        """The optimizer wrapper's, the parameters by their names; in the first process's memory."""
        wrapper = self.optim_wrapper
        own = {key: value for key, value in wrapper.state_dict().items() if key not in SHARDED}
        return {**own, **get_optimizer_state_dict(self.model, wrapper.optimizer, options=GATHERED)}

    def load_model_state_dict(self, state_dict: dict, **kwargs: Any) -> None:
        """Load a whole model's on the host, with its metadata and the layers' own hooks, and share it out."""
        whole = self.model_state_dict()
        if self.host is not None:
            self.host.load_state_dict(whole)
            sharded, self.model = self.model, self.host
            super().load_model_state_dict(state_dict, **kwargs)
            self.model, whole = sharded, self.host.state_dict()
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self.model, whole, options=options)

    def load_optim_state_dict(self, state_dict: dict) -> None:
        """Take each process's share of a whole optimizer's, saved by this strategy."""
        wrapper, options = self.optim_wrapper, StateDictOptions(full_state_dict=True)
        whole = {key: state_dict[key] for key in SHARDED}
        set_optimizer_state_dict(self.model, wrapper.optimizer, whole, options=options)
        wrapper.load_state_dict({**state_dict, **wrapper.optimizer.state_dict()})
