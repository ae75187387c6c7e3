"""Layer-wise learning rate decay, and no weight decay where the method has none."""

from typing import Any

from mmengine.logging import print_log
from mmengine.optim import DefaultOptimWrapperConstructor
from torch import nn

from mapet_mm.registry import OPTIM_WRAPPER_CONSTRUCTORS
from mapet_mm.utils.errors import UserError

OPTIONS = ("layer_decay_rate", "custom_keys")
# Not decayed, however many dimensions they have; the mask token is decayed.
UNDECAYED = ("cls_token", "reg_token", "dist_token", "pos_embed", "bias")
# Path components that data parallel, `torch.compile` and activation checkpointing add.
WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module")
BACKBONE = "backbone."


class LayerDecayError(UserError, ValueError):
    """Options of an optimizer that cannot be followed."""


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Optimizer with a learning rate per depth, for any model whose `backbone` has `get_layer_depth`.

    The backbone has D depths: the patch embedding is 0, layer i is i + 1, and all after the layers is D - 1.
    The learning rate at depth d is multiplied by `layer_decay_rate ** (D - 1 - d)`; everything outside the
    backbone has the full rate. Norm layers, biases, all parameters of one dimension, the class token,
    registers and positions are not decayed. The backbone may be anywhere in the model and, like its parts,
    inside wrappers. (MMPretrain's constructor needs `model.get_layer_depth`, MMSegmentation's a backbone of
    certain names.)

    Args:
        optim_wrapper_cfg: as for MMEngine's constructor; `optimizer` has to give `lr` and `weight_decay`.
        paramwise_cfg: the options, all optional:

            - `layer_decay_rate`: in (0, 1], default 1.
            - `custom_keys`: {part of a parameter's name: dict(lr_mult=..., decay_mult=...)}. The longest key
              that fits is used and changes only what it names; `lr_mult` multiplies the depth's factor.

    Raises:
        LayerDecayError: an option that is unknown, out of range or missing; or, for a rate below 1, a
            backbone that places no parameter below the top.
    """

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: dict | None = None) -> None:
        # MMEngine looks at the parameters one by one only if `paramwise_cfg` is not empty.
        super().__init__(optim_wrapper_cfg, {"layer_decay_rate": 1.0, **(paramwise_cfg or {})})
        self.rate = self.paramwise_cfg["layer_decay_rate"]
        unknown = sorted(set(self.paramwise_cfg) - set(OPTIONS))
        if unknown:
            raise LayerDecayError(f"paramwise_cfg has {', '.join(unknown)}: known are {', '.join(OPTIONS)}")
        if self.base_lr is None or self.base_wd is None:
            raise LayerDecayError("optim_wrapper.optimizer has to give `lr` and `weight_decay`")
        if not 0 < self.rate <= 1:
            raise LayerDecayError(f"paramwise_cfg.layer_decay_rate is {self.rate}: more than 0, at most 1")

    def add_params(self, params: list[dict], module: nn.Module, prefix: str = "", **kwargs: Any) -> None:
        """Append the model's parameter groups to `params`: one per depth, weight decay and rate."""
        depths = Depths(module) if self.rate < 1 else None
        if depths is not None:
            depths.require_below_top()
        groups: dict[tuple, dict] = {}
        for path, param in module.named_parameters():
            if not param.requires_grad:
                continue
            name = plain_name(path)
            depth = 0
            num_depths = 1
            if depths is not None:
                depth, num_depths = depths.of(name)
            custom = self._custom(name)
            lr = self.base_lr * self.rate ** (num_depths - 1 - depth) * custom.get("lr_mult", 1.0)
            is_decayed = param.ndim != 1 and name.rpartition(".")[2] not in UNDECAYED
            decay = self.base_wd * custom.get("decay_mult", float(is_decayed))
            group = groups.setdefault((depth, lr, decay), dict(params=[], lr=lr, weight_decay=decay))
            group["params"].append(param)
        params.extend(groups[key] for key in sorted(groups))
        rates = [group["lr"] for group in params]
        print_log(
            f"{len(params)} parameter groups, layer decay {self.rate:g}: "
            f"learning rates {min(rates, default=0):.3g} to {max(rates, default=0):.3g}",
            logger="current",
        )

    def _custom(self, name: str) -> dict[str, float]:
        """The options of the longest custom key in a parameter's name."""
        custom_keys = self.paramwise_cfg.get("custom_keys", {})
        longest = max((key for key in sorted(custom_keys) if key in name), key=len, default=None)
        return custom_keys.get(longest, {})


class Depths:
    """The depth of each parameter of a model, as its backbones with `get_layer_depth` say.

    Raises:
        LayerDecayError: the model has no such backbone.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = [plain_name(path) for path, _ in model.named_parameters()]
        self.backbones = find_backbones(model)
        if not self.backbones:
            kind = type(model).__name__
            raise LayerDecayError(f"{kind} has no `backbone.get_layer_depth`: leave `layer_decay_rate` out")

    def of(self, name: str) -> tuple[int, int]:
        """Depth and number of depths of a parameter, by its plain name."""
        for prefix, backbone in self.backbones.items():
            if name.startswith(prefix):
                # Always as `backbone.`: MMPretrain's ResNet knows no other prefix.
                return backbone.get_layer_depth(BACKBONE + name.removeprefix(prefix), BACKBONE)
        # All outside the backbones has the full rate.
        first = next(iter(self.backbones.values()))
        return first.get_layer_depth("head", BACKBONE)

    def require_below_top(self) -> None:
        """Raise LayerDecayError if all parameters of a backbone are at the top: nothing would decay."""
        for prefix, backbone in self.backbones.items():
            depths = [self.of(name) for name in self.names if name.startswith(prefix)]
            if all(depth == num_depths - 1 for depth, num_depths in depths):
                raise LayerDecayError(
                    f"get_layer_depth of {type(backbone).__name__} finds no parameter of `{prefix[:-1]}` "
                    "below the top, so all would learn at the full rate: what renames its layers?"
                )


def find_backbones(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules inside a `backbone` that have depths, by their plain names with a dot."""
    backbones: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        name = f"{plain_name(path)}."
        is_in_backbone = "backbone" in name.split(".")
        is_outermost = not name.startswith(tuple(backbones))
        if is_in_backbone and is_outermost and hasattr(module, "get_layer_depth"):
            backbones[name] = module
    return backbones


def plain_name(path: str) -> str:
    """A parameter's name without the path components of wrappers around the model's parts."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)
