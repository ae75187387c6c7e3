"""Attention weights of any backbone, read where they are computed and not by the backbone's class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)


class _ClassTokenAttention(TorchFunctionMode):
    """Keeps the first token's weights in the last self-attention over `tokens` tokens of `batch` images."""

    def __init__(self, batch: int, tokens: int) -> None:
        super().__init__()
        self.batch, self.tokens = batch, tokens
        self.weights: Float[Tensor, "batch head token"] | None = None

    def __torch_function__(
        self,
        function: Callable,
        types: Sequence[type],
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is F.multi_head_attention_forward:  # what it calls is out of sight
            return self._of_whole_attention(*args, **kwargs)
        result = function(*args, **kwargs)
        if function is F.scaled_dot_product_attention:
            self._keep(_first_row(*args, **kwargs))
        elif function in SOFTMAX and isinstance(result, Tensor) and result.shape[-2:] == (self.tokens,) * 2:
            self._keep(result[..., 0, :])
        return result

    def _of_whole_attention(
        self, *args: Any, need_weights: bool = True, average_attn_weights: bool = True, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        output, weights = F.multi_head_attention_forward(
            *args, need_weights=True, average_attn_weights=False, **kwargs
        )
        self._keep(weights[..., 0, :])
        wanted = weights.mean(-3) if average_attn_weights else weights
        return output, wanted if need_weights else None

    def _keep(self, weights: Tensor | None) -> None:
        """Weights `(B, heads, N)`, or the same with batch and heads in one; others are of something else."""
        if (
            weights is not None
            and weights.shape[-1] == self.tokens
            and not weights.shape[:-1].numel() % self.batch
        ):
            self.weights = weights.reshape(self.batch, -1, self.tokens)


def _first_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> Float[Tensor, "*batch key"] | None:
    """The first query's weights; None unless queries and keys are the same tokens."""
    if query.shape != key.shape or is_causal:
        return None
    scores = (query[..., :1, :].float() @ key.float().mT)[..., 0, :]
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        mask = attn_mask.expand(*scores.shape[:-1], *attn_mask.shape[-2:])[..., 0, :]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    return scores.softmax(-1)


@torch.no_grad()
def class_token_attention(
    forward: Callable[[Tensor], Any],
    images: Float[Tensor, "batch 3 height width"],
    prefix: int,
    grid: tuple[int, int],
) -> Float[Tensor, "batch head row column"] | None:
    """How much the class token attends to each patch in the last layer, by head.

    Args:
        forward: runs the backbone, in evaluation mode, on normalised images.
        images: `(B, 3, H, W)`.
        prefix: tokens before the patches, the class token first.
        grid: patches by rows and columns.

    Returns:
        `(B, heads, rows, columns)` float32 on the CPU; None where no attention over these tokens was seen.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # torch's own layers would compute it out of sight
    try:
        with _ClassTokenAttention(len(images), prefix + grid[0] * grid[1]) as seen:
            forward(images)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return None if seen.weights is None else seen.weights[..., prefix:].unflatten(-1, grid).float().cpu()
