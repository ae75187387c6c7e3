"""Checks of values that lie on a device."""

import torch
from torch import Tensor, nn


def should_check_values(module: nn.Module, values: Tensor) -> bool:
    """True if a module should check these values: always on CPU, else only until it sets `values_checked`.

    Reading values waits for the device, and cannot be part of a compiled graph.
    """
    return not torch.compiler.is_compiling() and (values.device.type == "cpu" or not module.values_checked)
