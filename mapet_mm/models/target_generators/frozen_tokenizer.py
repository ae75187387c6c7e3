"""Tokenizers from other libraries, for example MMPretrain's VQ-KD and DALL-E, frozen and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mapet_mm.models.target_generators.frozen_network import build_frozen, split_checkpoint, weights_digest
from mapet_mm.models.target_generators.token_ids import token_ids
from mapet_mm.models.target_generators.tokenizer import Tokenizer, TokenizerError
from mapet_mm.registry import MODELS
from mapet_mm.utils.identity import digest
from mapet_mm.utils.precision import full_float32


@MODELS.register_module()
class FrozenTokenizer(Tokenizer):
    """Target generator: any module that maps images to token ids or to logits over a vocabulary.

    It is never in training mode, in which MMPretrain's VQ-KD would keep updating its codebook.

    Args:
        tokenizer: config of the module, for example `dict(type="VQKD", ..., init_cfg=dict(type="Pretrained",
            checkpoint=<address or file>))`. The checkpoint must have all of the module's weights.
        image_size: side of the input images in pixels.
        vocab_size: number of token ids.
        random_seed: draw fixed random weights from this seed if there is no checkpoint.

    Raises:
        TokenizerError: see `build_frozen`, or VQ-KD's codebook is not initialised.

    Examples:
        >>> dalle = dict(type="mmpretrain.DALL-E", n_hid=8, n_blk_per_group=1, vocab_size=16)
        >>> tokenizer = FrozenTokenizer(dalle, image_size=32, vocab_size=16, random_seed=0)
        >>> tokenizer(torch.rand(2, 3, 32, 32)).shape  # ids of a grid of 4 x 4
        torch.Size([2, 16])
    """

    def __init__(
        self,
        tokenizer: Mapping[str, Any],
        image_size: int,
        vocab_size: int,
        random_seed: int | None = None,
    ) -> None:
        network, _ = build_frozen(tokenizer, random_seed)
        for name, buffer in network.named_buffers():
            if name.endswith("initted") and not bool(buffer.all()):
                raise TokenizerError(
                    f"the tokenizer's codebook is not initialised (`{name}` is 0): take a checkpoint of a "
                    "trained one, or set quantize_kmeans_init=False"
                )
        super().__init__(network, image_size)
        self.vocab_size = vocab_size
        self._config = split_checkpoint(tokenizer)[0]

    @cached_property
    def grid(self) -> tuple[int, int]:
        """(H, W) tokens of an image of `image_size`; the grid is square."""
        side = math.isqrt(self(torch.zeros(1, 3, self.image_size, self.image_size)).shape[1])
        return side, side

    @cached_property
    def digest(self) -> str:
        """Identity of this tokenizer: SHA-256 of its configuration and of the weights that decide tokens."""
        options = {"tokenizer": self._config, "image_size": self.image_size, "vocab_size": self.vocab_size}
        return digest([options, weights_digest(self.network)])

    @torch.no_grad()
    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Int64[Tensor, "batch grid"]:
        """Token ids (B, HW), int64, in raster order, of normalised images (B, 3, H, W)."""
        network = self.network_for(images)
        with full_float32(images.device):
            return token_ids(network(images.float()))
