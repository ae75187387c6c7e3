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
        ValueError: the outputs are neither, or are not finite for an image. On other devices than the CPU
            looking would wait for them; there the loss stops at the id -1.
    """
    tokens = unchecked_ids(outputs)
    if tokens.device.type == "cpu" and not torch.compiler.is_compiling() and (tokens < 0).any():
        image = int((tokens < 0).any(1).nonzero()[0])
        raise ValueError(
            f"the target generator gives NaN or infinity for image {image} of the batch: check its weights, "
            "and that image (one without contrast, if the network standardises images)"
        )
    return tokens


def unchecked_ids(outputs: Tensor) -> Int64[Tensor, "batch grid"]:
    """As `token_ids`, with the id -1 where the outputs are not finite.

    Raises:
        ValueError: the outputs are neither ids nor logits.
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


def is_due(module: nn.Module, values: Tensor) -> bool:
    """Whether a module looks at values that it checks: always on CPU, until `_checked` on other devices.

    Looking at them waits for the device, and cannot be part of a compiled graph.
    """
    return not torch.compiler.is_compiling() and (values.device.type == "cpu" or not module._checked)
