"""Cheap results computed again in the backward pass instead of kept for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@contextmanager
def recomputed(*results: tuple[Tensor, Callable[[], Tensor]], when: bool = True) -> Iterator[None]:
    """What is called inside keeps for its backward pass how to make these results, not the results.

    The gradients are the same, bit for bit: the functions give the same values again.

    Args:
        *results: contiguous tensors, each with the function that makes it; called without autocast and
            gradients.
        when: otherwise all is kept as usual.
    """
    if not when:
        yield
        return
    made_by = {result.data_ptr(): (result.numel(), make) for result, make in results}

    def pack(saved: Tensor) -> Tensor | Callable[[], Tensor]:
        numel, make = made_by.get(saved.data_ptr(), (0, None))
        if make is None or saved.numel() != numel or not saved.is_contiguous():
            return saved
        shape = saved.shape  # a linear layer keeps its input as a matrix
        return lambda: make().view(shape)

    def unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return packed()

    with saved_tensors_hooks(pack, unpack):
        yield
