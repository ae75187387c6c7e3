"""What target generators give, as token ids."""

import torch
from jaxtyping import Int64
from torch import Tensor, nn


def token_ids(outputs: Tensor) -> Int64[Tensor, "batch grid"]:
    """Token ids in raster order, whichever way a target generator gives its tokens.

    Args:
        outputs: `(B, HW)` integers, the ids themselves (`KCLIP`, `PrecomputedTokens`, MMPretrain's `VQKD`),
            or `(B, V, H, W)` floats, logits over the vocabulary (MMPretrain's `DALL-E`).

    Returns:
        `(B, HW)` int64.

    Raises:
        ValueError: the outputs are neither.
    """
    if outputs.ndim == 4 and outputs.is_floating_point():
        return outputs.argmax(1).flatten(1)  # B V H W -> B (H W)
    if outputs.ndim == 2 and not outputs.is_floating_point():
        return outputs.long()
    raise ValueError(
        f"the target generator gives {outputs.dtype} of shape {tuple(outputs.shape)}: expected token ids "
        "(B, HW) as integers, or logits (B, V, H, W)"
    )


def is_due(module: nn.Module, values: Tensor) -> bool:
    """Whether a module looks at values that it checks: always on CPU, until `_checked` on other devices.

    Looking at them waits for the device, and cannot be part of a compiled graph.
    """
    return not torch.compiler.is_compiling() and (values.device.type == "cpu" or not module._checked)
