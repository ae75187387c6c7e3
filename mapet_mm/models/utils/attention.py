"""Attention: the kernel is chosen by measurements (docs/performance.md)."""

import os

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


def switch_cudnn_attention() -> None:
    """Leave cuDNN's attention off in this process; MAPET_MM_CUDNN_ATTENTION=1 lets PyTorch choose it.

    With a mask, its gradients of queries may be NaN: where 64 keys remain after the last multiple of 128, in
    rows whose scores are all below -88 (pytorch issue 196678).
    """
    torch.backends.cuda.enable_cudnn_sdp(os.environ.get("MAPET_MM_CUDNN_ATTENTION") == "1")


def attend(
    queries: Float[Tensor, "batch head row channel"],
    keys: Float[Tensor, "batch head key channel"],
    values: Float[Tensor, "batch head key channel"],
    bias: Float[Tensor, "row key"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "batch head row channel"]:
    """Scaled dot-product attention with an additive mask; arguments are as for PyTorch's."""
    if uses_bmm(queries):
        return attend_with_bmm(queries, keys, values, bias, dropout)
    bias = None if bias is None else bias.to(queries.dtype)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, dropout_p=dropout)


def uses_bmm(queries: Tensor) -> bool:
    """True if `attend` takes matrix products: on CPU, bfloat16 has units that the fused kernel ignores."""
    return queries.device.type == "cpu" and queries.dtype is torch.bfloat16


def attend_with_bmm(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`attend` by two matrix products and a softmax; keeps the weights (B, H, R, K) for the backward pass."""
    batch_and_head = queries.shape[:2]
    scale = queries.shape[-1] ** -0.5

    # One dimension of images and heads, as batched products take it.
    queries = queries.flatten(0, 1)  # (B H) R d
    keys = keys.flatten(0, 1)  # (B H) K d
    values = values.flatten(0, 1)  # (B H) K d

    with torch.autocast(queries.device.type, enabled=False):  # its softmax would be a float32 copy
        if bias is None:
            scores = torch.bmm(queries * scale, keys.transpose(1, 2))
        else:  # scale and mask are part of the same call
            scores = torch.baddbmm(bias.to(queries.dtype), queries, keys.transpose(1, 2), alpha=scale)
        weights = F.dropout(scores.softmax(-1), dropout)  # (B H) R K
        return torch.bmm(weights, values).unflatten(0, batch_and_head)
