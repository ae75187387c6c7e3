"""Linear layers whose input is cheap: made again in the backward pass instead of kept for it."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# Which rows a linear layer takes, its weight and its bias.
Piece = tuple[slice, Tensor, Tensor | None]


def linears(
    rows: Float[Tensor, "batch row dim"], *pieces: Piece, make: Callable[[], Tensor] | None = None
) -> tuple[Tensor, ...]:
    """The results of linear layers, each on its range of the rows, in the rows' precision.

    Args:
        rows: `(B, L, D)`.
        *pieces: for each layer its rows, weight and bias.
        make: makes the rows again; then they are not kept for the backward pass. Called without gradients.
    """
    dtype = rows.dtype
    pieces = tuple(
        (where, weight.to(dtype), None if bias is None else bias.to(dtype)) for where, weight, bias in pieces
    )
    if make is None:
        return tuple(F.linear(rows[:, where].contiguous(), weight, bias) for where, weight, bias in pieces)
    places, weights, biases = zip(*pieces, strict=True)
    return _RemadeLinears.apply(rows, make, places, *weights, *biases)


class _RemadeLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        make: Callable[[], Tensor],
        places: tuple[slice, ...],
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[: len(places)], parameters[len(places) :]
        ctx.make, ctx.places, ctx.biased = make, places, [bias is not None for bias in biases]
        ctx.save_for_backward(*weights)
        layers = zip(places, weights, biases, strict=True)
        return tuple(F.linear(rows[:, where].contiguous(), weight, bias) for where, weight, bias in layers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows = ctx.make()
        by_rows, by_weights, by_biases = torch.zeros_like(rows), [], []
        layers = zip(ctx.places, ctx.saved_tensors, ctx.biased, gradients, strict=True)
        for where, weight, biased, gradient in layers:
            by_rows[:, where] += gradient @ weight
            gradient = gradient.flatten(0, 1)  # (B L) D
            by_weights.append(gradient.t() @ rows[:, where].flatten(0, 1))
            by_biases.append(gradient.sum(0) if biased else None)
        return by_rows, None, None, *by_weights, *by_biases
