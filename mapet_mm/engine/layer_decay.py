"""Layer-wise learning rate decay, and no weight decay where the method has none."""

import logging
from collections.abc import Callable
from typing import Any

from mmengine.logging import print_log
from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.utils.dl_utils.parrots_wrapper import _BatchNorm, _InstanceNorm
from torch import nn

from mapet_mm.registry import OPTIM_WRAPPER_CONSTRUCTORS

NORMS = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm)
OPTIONS = ("layer_decay_rate", "norm_decay_mult", "bias_decay_mult", "flat_decay_mult", "custom_keys")
# Not decayed though they have more than one dimension; the mask token is decayed.
UNDECAYED = ("cls_token", "pos_embed")
BACKBONE = "backbone."


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Optimizer with a learning rate per depth, for any model whose `backbone` has `get_layer_depth`.

    A parameter at depth d of the backbone's D (patch embedding 0, layer i at i + 1, all behind the layers at
    D - 1) learns at `layer_decay_rate ** (D - 1 - d)` of the rate; everything outside the backbone at the
    full rate. Without a rate (or with 1) only the weight decay differs, which is what pre-training needs.
    The paper's tables of hyper-parameters give both.

    Args:
        optim_wrapper_cfg: as for MMEngine's constructor; `optimizer` has to give `lr` and `weight_decay`.
        paramwise_cfg: the options, all optional:

            - `layer_decay_rate`: in (0, 1], default 1.
            - `norm_decay_mult`, `bias_decay_mult`, `flat_decay_mult`: factor on the weight decay of norm
              layers, of biases and of other parameters of one dimension, default 0.
            - `custom_keys`: {part of a parameter's name: dict(lr_mult=..., decay_mult=...)}. The longest key
              that fits counts and changes only what it names; `lr_mult` comes on top of the depth's factor.

    Raises:
        ValueError: an unknown option, a rate outside (0, 1], `lr` or `weight_decay` missing, or a model
            without `backbone.get_layer_depth` when the rate is not 1.
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
        depth_of = self._depth_function(module)
        groups: dict[tuple, dict] = {}
        for name, param in module.named_parameters():
            if not param.requires_grad:
                continue
            depth, depths = depth_of(name)
            custom = self._custom_options(name)
            scale = self.rate ** (depths - 1 - depth)
            lr = self.base_lr * scale * custom.get("lr_mult", 1.0)
            decay = self.base_wd * custom.get("decay_mult", self._decay_mult(module, name, param.ndim))
            group = groups.setdefault(
                (depth, lr, decay),
                dict(params=[], lr=lr, weight_decay=decay, lr_scale=scale, layer_depth=depth, names=[]),
            )
            group["params"].append(param)
            group["names"].append(name)
        params.extend(groups[key] for key in sorted(groups))
        _log_groups(params, self.rate)

    def _depth_function(self, model: nn.Module) -> Callable[[str], tuple[int, int]]:
        if self.rate == 1:
            return lambda name: (0, 1)
        get_layer_depth = getattr(getattr(model, "backbone", None), "get_layer_depth", None)
        if get_layer_depth is None:
            raise ValueError(
                f"layer_decay_rate is {self.rate}, but {type(model).__name__} has no "
                "`backbone.get_layer_depth`: take a backbone that has it (MaPeTViT, most of MMPretrain) "
                "or leave the rate out"
            )
        return lambda name: get_layer_depth(name, BACKBONE)

    def _custom_options(self, name: str) -> dict:
        custom_keys = self.paramwise_cfg.get("custom_keys", {})
        fitting = [key for key in sorted(custom_keys) if key in name]
        return custom_keys[max(fitting, key=len)] if fitting else {}

    def _decay_mult(self, model: nn.Module, name: str, ndim: int) -> float:
        owner, _, own_name = name.rpartition(".")
        if own_name in UNDECAYED:
            return 0.0
        if isinstance(model.get_submodule(owner), NORMS):
            return self.paramwise_cfg.get("norm_decay_mult", 0.0)
        if own_name == "bias":
            return self.paramwise_cfg.get("bias_decay_mult", 0.0)
        return self.paramwise_cfg.get("flat_decay_mult", 0.0) if ndim == 1 else 1.0


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
