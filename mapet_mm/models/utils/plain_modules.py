"""Which modules a forward pass may leave out and compute by itself from their parameters."""

from torch import nn

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def is_plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether calling a module is the forward pass of one of these classes and nothing else.

    It is not if a wrapper (LoRA) or a subclass computes something else, or if the module has hooks.
    """
    forward = type(module).forward
    if "forward" in module.__dict__:  # of its own, as some libraries set
        return False
    return any(forward is kind.forward for kind in kinds) and not any(getattr(module, one) for one in HOOKS)
