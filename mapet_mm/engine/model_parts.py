"""Find a model's parts inside the wrappers around them."""

import inspect

from mmengine.model import is_model_wrapper
from torch import nn


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside MMEngine's wrapper (data parallel, sharding), or the model itself."""
    return model.module if is_model_wrapper(model) else model


def plain_names(model: nn.Module) -> dict[str, str]:
    """The name of each module and parameter, by its path, without the wrappers that stand for a part.

    `torch.compile`, activation checkpointing and DDP put `_orig_mod` and the like into the paths. They are
    told by what they do: they give the parts of their only child as their own, or MMEngine knows them.
    """
    hidden = {
        f"{path}.{inner}".lstrip(".")
        for path, module in model.named_modules()
        if (inner := _stands_for(module))
    }

    def plain(path: str) -> str:
        parts = path.split(".")
        return ".".join(part for i, part in enumerate(parts, 1) if ".".join(parts[:i]) not in hidden)

    members = [*model.named_modules(), *model.named_parameters()]
    return {path: plain(path) for path, _ in members}


def _stands_for(module: nn.Module) -> str | None:
    """Name of the child that `module` stands for, if it does."""
    if len(module._modules) != 1:
        return None
    ((name, child),) = module._modules.items()
    parts = {**child._modules, **child._parameters} if child is not None else {}
    passes_on = parts and all(getattr(module, part, None) is value for part, value in parts.items())
    return name if passes_on or is_model_wrapper(module) else None


def find_backbones(model: nn.Module) -> dict[str, nn.Module]:
    """By its path, each module with `get_layer_depth` that is a `backbone` of the model or inside of one."""
    found: dict[nn.Module, str] = {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] != "backbone":
            continue
        for inner_path, inner in module.named_modules(prefix=path):
            # Looked up statically, because wrappers that pass attributes on would have it as well.
            if inspect.getattr_static(inner, "get_layer_depth", None) is not None:
                found.setdefault(inner, inner_path)
                break
    return {path: backbone for backbone, path in found.items()}
