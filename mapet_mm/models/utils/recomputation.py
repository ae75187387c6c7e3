"""Recompute LayerNorm and GELU in the backward pass: keeping their outputs costs more than computing them.

PyTorch's own way, selective checkpointing, was tried: it is slower and keeps more (docs/performance.md).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mapet_mm.utils.precision import product_dtype

CHEAP = (nn.LayerNorm, nn.GELU)  # both keep their own input anyway


@contextmanager
def recomputing(layer: nn.Module) -> Iterator[None]:
    """Within this context, operations of a layer do not keep what its LayerNorms and GELUs return.

    The backward pass calls the modules again, which gives the same bits. LayerNorm returns its result in the
    precision of autocast's products, which would otherwise keep a copy in that precision. Where there is no
    copy, its result is kept: a second run costs more time than its memory is worth.
    """
    # Each cheap result by the address of its memory, with the module and the input that give it again. An
    # address is unique as long as its tensor lives, and this dictionary keeps the tensors until the layer
    # ends. A tensor found by its address is therefore the result itself, or a view that begins where the
    # result does. A wrong hit would give the backward pass other numbers, so `pack` takes only views of the
    # whole result in its own order; that excludes the first rows alone, which share the address as well.
    results: dict[int, tuple[Tensor, nn.Module, Tensor]] = {}

    def note(module: nn.Module, inputs: tuple[Tensor], result: Tensor) -> Tensor:
        cast = result.to(product_dtype(result))
        if cast is not result or isinstance(module, nn.GELU):
            results[cast.data_ptr()] = cast, module, inputs[0].detach()
        return cast

    def pack(kept: Tensor) -> Tensor | tuple:
        result, module, given = results.get(kept.data_ptr(), (None, None, None))
        is_whole = result is not None and kept.numel() == result.numel() and kept.is_contiguous()
        if not is_whole:
            return kept
        return module, given, kept.dtype, kept.shape

    hooks = [one.register_forward_hook(note) for one in layer.modules() if isinstance(one, CHEAP)]
    try:
        with saved_tensors_hooks(pack, _unpack):
            yield
    finally:
        results.clear()  # the graph holds on to `pack`
        for hook in hooks:
            hook.remove()


def _unpack(packed: Tensor | tuple) -> Tensor:
    """What was kept, or the module's result once more."""
    if isinstance(packed, Tensor):
        return packed
    module, given, dtype, shape = packed
    return module(given).to(dtype).view(shape)
