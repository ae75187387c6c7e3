"""What target generators give, as token ids."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn


def token_ids(outputs: Tensor) -> Int64[Tensor, "batch grid"]:
    """Token ids in raster order, whichever way a target generator gives its tokens.

    Args:
        outputs: `(B, HW)` integers, the ids themselves (`KCLIP`, `PrecomputedTokens`, MMPretrain's `VQKD`),
            or `(B, V, H, W)` floats, logits over the vocabulary (MMPretrain's `DALL-E`).

    Returns:
        `(B, HW)` int64; -1 where the outputs are not finite.

    Raises:
        ValueError: the outputs are neither.
    """
    if outputs.ndim == 4 and outputs.is_floating_point():
        tokens = outputs.argmax(1, keepdim=True)  # of a NaN, where there is one
        tokens = tokens.masked_fill(~outputs.gather(1, tokens).isfinite(), -1)
        return tokens.flatten(1)  # B 1 H W -> B (H W)
    if outputs.ndim == 2 and not outputs.is_floating_point():
        return outputs.long()
    raise ValueError(
        f"the target generator gives {outputs.dtype} of shape {tuple(outputs.shape)}: expected token ids "
        "(B, HW) as integers, or logits (B, V, H, W)"
    )


def presence(tokens: Int64[Tensor, "*batch target"]) -> Float[Tensor, "*batch"]:
    """1 for each image with tokens, NaN for one without (id -1): what its loss is multiplied by.

    A loss that is not finite is noticed (`NonFiniteHook` leaves the step out), and no device is waited for.
    """
    return torch.where((tokens < 0).any(-1), torch.nan, 1.0)


def is_due(module: nn.Module, values: Tensor) -> bool:
    """Whether a module looks at values that it checks: always on CPU, until `_checked` on other devices.

    Looking at them waits for the device, and cannot be part of a compiled graph.
    """
    return not torch.compiler.is_compiling() and (values.device.type == "cpu" or not module._checked)
