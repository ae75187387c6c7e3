"""LayerNorm and GELU computed again in the backward pass, because their results cost more than they do."""

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
    results: dict[int, tuple[Tensor, nn.Module, Tensor]] = {}

    def note(module: nn.Module, inputs: tuple[Tensor], result: Tensor) -> Tensor:
        cast = result.to(product_dtype(result))
        if cast is not result or isinstance(module, nn.GELU):
            results[cast.data_ptr()] = cast, module, inputs[0].detach()
        return cast

    def pack(kept: Tensor) -> Tensor | tuple:
        result, module, given = results.get(kept.data_ptr(), (None, None, None))
        # A view of the whole result, such as a matrix of its rows; a part of it is kept.
        if result is None or kept.numel() != result.numel() or not kept.is_contiguous():
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
    if isinstance(packed, Tensor):
        return packed
    module, given, dtype, shape = packed
    return module(given).to(dtype).view(shape)
