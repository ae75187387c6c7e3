"""Token ids, initial weights and precisions: small functions that several models share."""

import torch
from jaxtyping import Float, Int64
from mmengine.model.weight_init import trunc_normal_
from torch import Tensor, nn

STD = 0.02
# The authors truncate at +-2: no truncation at this standard deviation. Sampling by the inverse error
# function gives about one infinity in 2^24 draws, clamped to the bound, so the bound has to be harmless.
BOUND = 10 * STD


def init_truncated_normal(tensor: Tensor) -> None:
    """Fill linear weights, position embeddings or mask tokens in place: normal, standard deviation 0.02."""
    trunc_normal_(tensor, std=STD, a=-BOUND, b=BOUND)


def token_ids(outputs: Tensor) -> Int64[Tensor, "batch grid"]:
    """Token ids `(B, HW)` in raster order from the output of any target generator; -1 where it is not finite.

    The outputs are the ids themselves (`KCLIP`, `PrecomputedTokens`, MMPretrain's `VQKD`), or floats
    `(B, V, H, W)`, logits over the vocabulary (MMPretrain's `DALL-E`); others are a ValueError.
    """
    if outputs.ndim == 4 and outputs.is_floating_point():
        tokens = outputs.argmax(1, keepdim=True)  # a NaN counts as the largest
        tokens = tokens.masked_fill(~outputs.gather(1, tokens).isfinite(), -1)
        return tokens.flatten(1)  # B 1 H W -> B (H W)
    if outputs.ndim == 2 and not outputs.is_floating_point():
        return outputs.long()
    raise ValueError(f"the target generator gives {outputs.dtype} {tuple(outputs.shape)}: expected token ids")


def nan_without_tokens(tokens: Int64[Tensor, "*batch target"]) -> Float[Tensor, "*batch"]:
    """Factor of each image's loss: 1 with tokens, NaN for an image without them (id -1).

    A loss that is not finite is noticed after the step, and no device is waited for.
    """
    return torch.where((tokens < 0).any(-1), torch.nan, 1.0)


def should_check_values(module: nn.Module, values: Tensor) -> bool:
    """True if a module should check these values: always on CPU, else only until it sets `values_checked`.

    Reading values waits for the device, and cannot be part of a compiled graph.
    """
    return not torch.compiler.is_compiling() and (values.device.type == "cpu" or not module.values_checked)


def product_dtype(operand: Tensor) -> torch.dtype:
    """Data type in which autocast multiplies an operand; its own type without autocast."""
    device = operand.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else operand.dtype


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Data type of softmax and sums over products of `dtype`: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
