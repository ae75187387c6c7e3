"""Attention, by the fastest kernel that is right for each call."""

from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# Where cuDNN's attention with a mask was compared with float64 and was right: its version, the GPU's compute
# capability and the number of keys. Elsewhere it may be wrong: where 64 keys remain after the last multiple
# of 128, gradients of rows whose scores are all below -88 are NaN (pytorch issue 196678). `pytest -m gpu -k
# cudnn` compares every remainder on another card or version.
CUDNN_IS_RIGHT = {(91900, (9, 0), 334), (91900, (9, 0), 344)}


@torch.compiler.assume_constant_result
def kernels_with_mask(num_keys: int) -> list[SDPBackend]:
    """PyTorch's kernels that a GPU may take for attention with a mask, the preferred one first.

    All that are switched on, but cuDNN's only where it is known to be right, and never under deterministic
    algorithms, which its gradients are not.
    """
    backends = torch.backends.cuda
    others = {
        SDPBackend.FLASH_ATTENTION: backends.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: backends.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: backends.math_sdp_enabled(),
    }
    kernels = [kernel for kernel, is_enabled in others.items() if is_enabled]
    if backends.cudnn_sdp_enabled() and (not kernels or cudnn_is_right(num_keys)):
        kernels.insert(0, SDPBackend.CUDNN_ATTENTION)
    return kernels


def cudnn_is_right(num_keys: int) -> bool:
    """True if cuDNN's attention with a mask was right at so many keys, here."""
    if torch.are_deterministic_algorithms_enabled() or not torch.cuda.is_available():
        return False
    here = (torch.backends.cudnn.version(), torch.cuda.get_device_capability(), num_keys)
    return here in CUDNN_IS_RIGHT


def choosing_kernel(keys: Tensor) -> AbstractContextManager:
    """A context in which attention with a mask takes a kernel that is right at this number of keys."""
    if keys.device.type != "cuda":
        return nullcontext()
    return sdpa_kernel(kernels_with_mask(keys.shape[2]), set_priority=True)


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
    if bias is None:
        return F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout)
    bias = bias.to(queries.dtype)
    with choosing_kernel(keys):
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
