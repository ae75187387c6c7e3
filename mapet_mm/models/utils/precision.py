"""The precisions in which products, and what is summed over them, run."""

import torch
from torch import Tensor


def product_dtype(operand: Tensor) -> torch.dtype:
    """What autocast would turn the operand of a matrix product into; without autocast its own type."""
    device = operand.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else operand.dtype


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of softmax and sums over products of this one: float32, or float64 of float64."""
    return torch.promote_types(dtype, torch.float32)
