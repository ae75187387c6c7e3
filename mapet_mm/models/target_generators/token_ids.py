"""Token ids from the output of any target generator, and images that have none."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def token_ids(outputs: Tensor) -> Int64[Tensor, "batch grid"]:
    """Token ids `(B, HW)` in raster order from the output of any target generator; -1 where it is not finite.

    The outputs are the ids themselves (`KCLIP`, `PrecomputedTokens`, MMPretrain's `VQKD`), or floats
    `(B, V, H, W)`, logits over the vocabulary (MMPretrain's `DALL-E`); others are a ValueError.
    """
    if outputs.ndim == 4 and outputs.is_floating_point():
        tokens = outputs.argmax(1, keepdim=True)  # of a NaN, where there is one
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
