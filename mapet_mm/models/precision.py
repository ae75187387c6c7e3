"""The precision in which products run."""

import torch
from torch import Tensor


def product_dtype(operand: Tensor) -> torch.dtype:
    """What autocast would turn the operand of a matrix product into; without autocast its own type."""
    device = operand.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else operand.dtype
