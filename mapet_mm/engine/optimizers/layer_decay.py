"""Layer-wise learning rate decay, and no weight decay where the method has none."""

import logging
from collections.abc import Callable
from typing import Any

from mmengine.logging import print_log
from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.utils.dl_utils.parrots_wrapper import _BatchNorm, _InstanceNorm
from torch import nn

from mapet_mm.engine.model_parts import find_backbones, plain_names
from mapet_mm.registry import OPTIM_WRAPPER_CONSTRUCTORS

NORMS = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm)
OPTIONS = ("layer_decay_rate", "norm_decay_mult", "bias_decay_mult", "flat_decay_mult", "custom_keys")
# Not decayed though they have more than one dimension; the mask token is decayed.
UNDECAYED = ("cls_token", "pos_embed")
BACKBONE = "backbone."


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Optimizer with a learning rate per depth, for any model whose `backbone` has `get_layer_depth`.

    The backbone has D depths: the patch embedding is 0, layer i is i + 1, and all after the layers is D - 1.
    The learning rate at depth d is multiplied by `layer_decay_rate ** (D - 1 - d)`; everything outside the
    backbone has the full rate. Without a decay rate (or with 1) only the weight decay differs between
    parameters, as pre-training needs it. The paper's tables of hyper-parameters give both.

    The backbone may be anywhere in the model and, like its parts, inside wrappers (`torch.compile`, DDP,
    activation checkpointing). MMPretrain's constructor needs `model.get_layer_depth`, which MMSegmentation's
    models do not have; MMSegmentation's needs a backbone whose class name contains BEiT, MAE or ConvNeXt.

    Args:
        optim_wrapper_cfg: as for MMEngine's constructor; `optimizer` has to give `lr` and `weight_decay`.
        paramwise_cfg: the options, all optional:

            - `layer_decay_rate`: in (0, 1], default 1.
            - `norm_decay_mult`, `bias_decay_mult`, `flat_decay_mult`: factor on the weight decay of norm
              layers, of biases and of other parameters of one dimension, default 0.
            - `custom_keys`: {part of a parameter's name: dict(lr_mult=..., decay_mult=...)}. The longest key
            that fits is used and changes only what it names; `lr_mult` multiplies the depth's factor.

    Raises:
        ValueError: an unknown option, a rate outside (0, 1], `lr` or `weight_decay` missing, parameters
            flattened by PyTorch's first FSDP, or, when the rate is not 1, a model without
            `backbone.get_layer_depth` or with one that places no parameter below the top.
    """

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: dict | None = None) -> None:
        # Never empty: MMEngine would not look at the parameters one by one then.
        super().__init__(optim_wrapper_cfg, {"layer_decay_rate": 1.0, **(paramwise_cfg or {})})

    def _validate_cfg(self) -> None:
        super()._validate_cfg()
        unknown = set(self.paramwise_cfg) - set(OPTIONS)
        if unknown:
            raise ValueError(
                f"optim_wrapper.paramwise_cfg has {', '.join(sorted(unknown))}: "
                f"{type(self).__name__} knows {', '.join(OPTIONS)}"
            )
        for name, value in (("lr", self.base_lr), ("weight_decay", self.base_wd)):
            if value is None:
                raise ValueError(f"optim_wrapper.optimizer has no `{name}`: set it")
        if not 0 < self.rate <= 1:
            raise ValueError(
                f"optim_wrapper.paramwise_cfg.layer_decay_rate is {self.rate}: more than 0, at most 1"
            )

    @property
    def rate(self) -> float:
        """The factor from one depth to the one before it."""
        return self.paramwise_cfg["layer_decay_rate"]

    def add_params(self, params: list[dict], module: nn.Module, prefix: str = "", **kwargs: Any) -> None:
        """Append the model's parameter groups to `params`: one per depth, weight decay and rate."""
        names = plain_names(module)
        depth_of = self._depth_function(module, names)
        groups: dict[tuple, dict] = {}
        for path, param in module.named_parameters():
            if not param.requires_grad:
                continue
            name = names[path]
            depth, depths = depth_of(name)
            custom = self._custom_options(name)
            scale = self.rate ** (depths - 1 - depth)
            lr = self.base_lr * scale * custom.get("lr_mult", 1.0)
            decay = self.base_wd * custom.get("decay_mult", self._decay_mult(module, path, param))
            group = groups.setdefault(
                (depth, lr, decay),
                dict(params=[], lr=lr, weight_decay=decay, lr_scale=scale, layer_depth=depth, names=[]),
            )
            group["params"].append(param)
            group["names"].append(name)
        params.extend(groups[key] for key in sorted(groups))
        _log_groups(params, self.rate)

    def _depth_function(self, model: nn.Module, names: dict[str, str]) -> Callable[[str], tuple[int, int]]:
        """Depth and number of depths of a parameter, by its plain name."""
        if self.rate == 1:
            return lambda name: (0, 1)
        backbones = {f"{names[path]}.": backbone for path, backbone in find_backbones(model).items()}
        if not backbones:
            raise ValueError(
                f"layer_decay_rate is {self.rate}, but {type(model).__name__} has no "
                "`backbone.get_layer_depth`: take a backbone that has it (MaPeTViT, most of MMPretrain) "
                "or leave the rate out"
            )
        for prefix, backbone in backbones.items():
            inside = (names[path] for path, _ in model.named_parameters() if names[path].startswith(prefix))
            if all(depth == depths - 1 for depth, depths in (_depth_in(backbones, name) for name in inside)):
                raise ValueError(
                    f"layer_decay_rate={self.rate}, but get_layer_depth of {type(backbone).__name__} finds "
                    f"no parameter of `{prefix[:-1]}` below the top, so all would learn at the full rate: "
                    "check what wraps or renames its layers"
                )
        return lambda name: _depth_in(backbones, name)

    def _custom_options(self, name: str) -> dict:
        custom_keys = self.paramwise_cfg.get("custom_keys", {})
        fitting = [key for key in sorted(custom_keys) if key in name]
        return custom_keys[max(fitting, key=len)] if fitting else {}

    def _decay_mult(self, model: nn.Module, path: str, param: nn.Parameter) -> float:
        if getattr(param, "_fsdp_flattened", False):
            raise ValueError(
                f"`{path}` is flattened by FullyShardedDataParallel, which hides what is decayed and what is "
                "not: use strategy mapet_mm.FullyShardedStrategy"
            )
        owner, _, own_name = path.rpartition(".")
        if own_name in UNDECAYED:
            return 0.0
        if isinstance(model.get_submodule(owner), NORMS):
            return self.paramwise_cfg.get("norm_decay_mult", 0.0)
        if own_name == "bias":
            return self.paramwise_cfg.get("bias_decay_mult", 0.0)
        return self.paramwise_cfg.get("flat_decay_mult", 0.0) if param.ndim == 1 else 1.0


def _depth_in(backbones: dict[str, nn.Module], name: str) -> tuple[int, int]:
    """What the parameter's backbone says of it, or the first one of a parameter outside all of them."""
    prefix = next((prefix for prefix in backbones if name.startswith(prefix)), None)
    if prefix is not None:
        # Always as `backbone.`: MMPretrain's ResNet knows no other prefix.
        return backbones[prefix].get_layer_depth(BACKBONE + name[len(prefix) :], BACKBONE)
    first = next(iter(backbones))
    owner = first[: first.rindex(BACKBONE)]
    return backbones[first].get_layer_depth(name.removeprefix(owner), BACKBONE)


def _log_groups(groups: list[dict], rate: float) -> None:
    sizes = [sum(param.numel() for param in group["params"]) for group in groups]
    decayed = sum(size for size, group in zip(sizes, groups, strict=True) if group["weight_decay"])
    rates = [group["lr"] for group in groups]
    print_log(
        f"{len(groups)} parameter groups, layer decay {rate:g}: "
        f"learning rates {min(rates, default=0):.3g} to {max(rates, default=0):.3g}; "
        f"weight decay on {decayed:,} of {sum(sizes):,} parameters",
        logger="current",
    )
    for group, size in zip(groups, sizes, strict=True):
        print_log(
            f"depth {group['layer_depth']}: lr {group['lr']:.3g} (x {group['lr_scale']:.3g}), weight decay "
            f"{group['weight_decay']:g}, {size:,} parameters: {', '.join(group['names'])}",
            logger="current",
            level=logging.DEBUG,
        )
