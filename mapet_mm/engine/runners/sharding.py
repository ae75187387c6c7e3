"""Train models that are too large for one device: their states sharded over the processes."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from mmengine._strategy import DDPStrategy
from mmengine.device import get_device
from mmengine.dist import broadcast, get_world_size, is_distributed, is_main_process
from mmengine.logging import MMLogger
from mmengine.optim import AmpOptimWrapper, BaseOptimWrapper
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from mapet_mm.engine.optimizers.autocast_optim_wrapper import AutocastOptimWrapper
from mapet_mm.engine.optimizers.layer_decay import NORMS
from mapet_mm.registry import OPTIM_WRAPPERS, STRATEGIES
from mapet_mm.utils.config import class_of
from mapet_mm.utils.dist import choose_dtype
from mapet_mm.utils.logging import quieten

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHARDED = ("state", "param_groups")  # the parts of an optimizer's state dict that are


@STRATEGIES.register_module()
class FullyShardedStrategy(DDPStrategy):
    """Data parallel with parameters, gradients and optimizer state sharded (PyTorch's `fully_shard`, FSDP2).

    For `runner_type="FlexibleRunner"`. Each process keeps its share of every parameter and gathers a layer
    only while it runs. The model is built in the host's memory, and the device gets one layer at a time, of
    which it keeps its share. Checkpoints hold the whole model under its usual names, so any recipe takes
    them.
    (MMEngine's own `FSDPStrategy` flattens parameters: gradient clipping and weight decay would go wrong.)

    In float32, losses and gradients are those of plain data parallel training. In bfloat16, half as much is
    gathered, and only the LayerScales are less exact than in plain autocast, which also rounds the layers'
    other weights. Norms, shares, optimizer and the sums of gradients stay in float32.

    Args:
        units: names of the model's module lists whose members are gathered one at a time.
        param_dtype: what members of the units are gathered and, in autocast, computed in, in validation too:
            'float32', 'bfloat16', or 'auto', bfloat16 where the optimizer wrapper autocasts to it.
        reduce_dtype: what their gradients are summed in over the processes, 'float32' or 'bfloat16'.
        **kwargs: as for MMEngine's `DDPStrategy`.

    Raises:
        ValueError: another dtype.
    """

    def __init__(
        self,
        *,
        units: Sequence[str] = ("backbone.layers",),
        param_dtype: str = "auto",
        reduce_dtype: str = "float32",
        **kwargs: Any,
    ) -> None:
        for name, value in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
            known = [*DTYPES, "auto"] if name == "param_dtype" else [*DTYPES]
            if value not in known:
                raise ValueError(f"strategy.{name} is {value!r}: one of {', '.join(known)}")
        self.units = (units,) if isinstance(units, str) else tuple(units)
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        self.autocast_dtype = torch.float32
        super().__init__(**kwargs)

    def prepare(
        self, model: nn.Module | dict, *, optim_wrapper: BaseOptimWrapper | dict | None = None, **kwargs: Any
    ) -> Any:
        """Shard the model and build the rest; the optimizer wrapper may decide the precision."""
        self.autocast_dtype = _autocast_dtype(optim_wrapper)
        return super().prepare(model, optim_wrapper=optim_wrapper, **kwargs)

    def _wrap_model(self, model: nn.Module) -> nn.Module:
        """Shard the model in place."""
        if not is_distributed():
            raise ValueError("strategy FullyShardedStrategy needs several processes: tools/dist_train.sh")
        model = self.convert_model(model)
        for tensor in model.state_dict().values():  # each process has drawn its own
            broadcast(tensor)
        mesh = init_device_mesh(get_device(), (get_world_size(),))
        layers = self._layers(model)
        for layer in layers:
            self._shard_unit(layer, mesh)
        for before, layer in itertools.pairwise(layers):  # past the norms, which are units between
            layer.set_modules_to_backward_prefetch([before])
        # Sharding has moved all tensors; the data preprocessor still has to know the device.
        model = fully_shard(model, mesh=mesh).to(get_device())
        if hasattr(model, "extract_feat"):  # what hooks call beside `forward`
            register_fsdp_forward_method(model, "extract_feat")
        return model

    def _shard_unit(self, layer: nn.Module, mesh: DeviceMesh) -> None:
        dtype = self.autocast_dtype if self.param_dtype == "auto" else DTYPES[self.param_dtype]
        policy = MixedPrecisionPolicy()
        if dtype is not torch.float32:
            # The inputs are not cast: what is added up from layer to layer stays in float32, and the norms of
            # it do, each a unit of its own.
            policy = MixedPrecisionPolicy(dtype, DTYPES[self.reduce_dtype], cast_forward_inputs=False)
            layer.forward = torch.autocast(mesh.device_type, dtype)(layer.forward)
            for norm in filter(lambda module: isinstance(module, NORMS), layer.modules()):
                fully_shard(norm, mesh=mesh)
        fully_shard(layer, mesh=mesh, mp_policy=policy)

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

    def build_logger(self, *args: Any, **kwargs: Any) -> MMLogger:
        """Build the logger; what is logged in many lines stands in its file only."""
        return quieten(super().build_logger(*args, **kwargs))

    def load_checkpoint(self, filename: str, *, map_location: Any = "cpu", **kwargs: Any) -> dict:
        """Read a checkpoint into the host's memory; MMEngine's default would put it whole on each device."""
        map_location = "cpu" if map_location == "default" else map_location
        return super().load_checkpoint(filename, map_location=map_location, **kwargs)

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


def _autocast_dtype(optim_wrapper: BaseOptimWrapper | dict | None) -> torch.dtype:
    """bfloat16 where an optimizer wrapper, or the config of one, autocasts to it; else float32."""
    if isinstance(optim_wrapper, dict):
        kind, dtype = optim_wrapper.get("type", "OptimWrapper"), optim_wrapper.get("dtype")
        kind = class_of(kind, OPTIM_WRAPPERS)
        if issubclass(kind, AutocastOptimWrapper):
            dtype = choose_dtype(get_device(), dtype)
    else:
        kind, dtype = type(optim_wrapper), getattr(optim_wrapper, "dtype", None)
    autocasts = issubclass(kind, (AutocastOptimWrapper, AmpOptimWrapper))
    return torch.bfloat16 if autocasts and dtype in ("bfloat16", torch.bfloat16) else torch.float32
