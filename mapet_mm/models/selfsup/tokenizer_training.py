"""Training of MMPretrain's VQ-KD on a frozen teacher, and of its DALL-E encoder as a discrete autoencoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from mmengine.model import BaseModel
from torch import Tensor, nn
from torch.nn import functional as F

from mapet_mm.registry import MODELS


@MODELS.register_module()
class VQKDDistillation(BaseModel):
    """VQ-KD as BEiT v2 trains it: the decoded codes learn to have the direction of the teacher's features.

    Its checkpoints are weights for `FrozenTokenizer`, with the prefix `tokenizer.`.

    Args:
        tokenizer: config of MMPretrain's `VQKD`.
        teacher: config of a `KCLIP` or `GridKMeans` without codebook, whose features are the targets; it has
            the tokenizer's grid.
        grid: (H, W) tokens.
        decoder_layers: transformer layers between codes and features.
        decoder_heads: attention heads of these layers; they have to divide the encoder's width.
        data_preprocessor: MMPretrain's for images with two views, the tokenizer's and the teacher's.
        init_cfg: as for any model of MMEngine.

    Raises:
        ValueError: the teacher has another grid, or the heads do not divide the width.
    """

    def __init__(
        self,
        tokenizer: Mapping[str, Any],
        teacher: Mapping[str, Any],
        grid: tuple[int, int],
        decoder_layers: int = 1,
        decoder_heads: int = 3,
        data_preprocessor: dict | None = None,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(data_preprocessor, init_cfg)
        self.tokenizer, self.teacher = MODELS.build(tokenizer), MODELS.build(teacher)
        if tuple(grid) != self.teacher.grid:
            raise ValueError(f"the tokenizer's grid is {tuple(grid)}, the teacher's {self.teacher.grid}")
        width, code_dim = self.tokenizer.encoder.embed_dims, self.tokenizer.quantize.codebook_dim
        if width % decoder_heads:
            raise ValueError(
                f"decoder_heads={decoder_heads} does not divide the tokenizer's width of {width} "
                "(`embed_dims` of its encoder's `arch`): set `model.decoder_heads` to a divisor"
            )
        self.position = nn.Parameter(torch.zeros(1, grid[0] * grid[1], width))
        layer = nn.TransformerEncoderLayer(
            width, decoder_heads, 4 * width, dropout=0, activation="gelu", batch_first=True, norm_first=True
        )
        self.decoder_in, self.decoder_out = nn.Linear(code_dim, width), nn.Linear(width, self.teacher.dim)
        self.decoder = nn.TransformerEncoder(layer, decoder_layers, enable_nested_tensor=False)

    def forward(
        self, inputs: list[Tensor], data_samples: list | None = None, mode: str = "tensor"
    ) -> dict[str, Tensor] | Tensor:
        """Losses of `inputs`, the tokenizer's view and the teacher's; or the tokens of the first view."""
        if mode != "loss":
            return self.tokenizer(inputs[0])
        codes, _, code_loss = self.tokenizer.encode(inputs[0])
        tokens = self.decoder_in(codes.flatten(2).transpose(1, 2)) + self.position  # B D H W -> B (H W) D
        decoded = self.decoder_out(self.decoder(tokens))
        distance = 1 - F.cosine_similarity(decoded, self.teacher.features(inputs[1]), dim=-1).mean()
        return {"loss_teacher": distance, "loss_codes": code_loss}


@MODELS.register_module()
class DiscreteAutoencoder(BaseModel):
    """MMPretrain's DALL-E encoder trained on pixels: a discrete variational autoencoder (Ramesh et al. 2021).

    Tokens are drawn by Gumbel-softmax and decoded to the image, with a smaller decoder and a simpler loss
    (squared differences) than theirs. Checkpoints are weights for `FrozenTokenizer`, prefix `tokenizer.`.

    Args:
        tokenizer: config of MMPretrain's `DALL-E`.
        temperature: of the Gumbel-softmax.
        spread: weight of the loss that favours an even use of the vocabulary.
        data_preprocessor: MMPretrain's.
        init_cfg: as for any model of MMEngine.
    """

    STAGES = 3  # the encoder halves the image so often

    def __init__(
        self,
        tokenizer: Mapping[str, Any],
        temperature: float = 1.0,
        spread: float = 0.01,
        data_preprocessor: dict | None = None,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(data_preprocessor, init_cfg)
        self.tokenizer = MODELS.build(tokenizer).requires_grad_(True)
        self.temperature, self.spread = temperature, spread
        self.vocab_size = tokenizer["vocab_size"]
        width = 32 * 2**self.STAGES
        layers: list[nn.Module] = [nn.Conv2d(self.vocab_size, width, 1)]
        for _ in range(self.STAGES):
            layers += [nn.ReLU(), nn.ConvTranspose2d(width, width // 2, 4, stride=2, padding=1)]
            width //= 2
        self.decoder = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(
        self,
        inputs: Float[Tensor, "batch 3 height width"],
        data_samples: list | None = None,
        mode: str = "tensor",
    ) -> dict[str, Tensor] | Tensor:
        """Losses of images, or the logits of their tokens (B, V, H, W)."""
        logits = self.tokenizer(inputs)
        if mode != "loss":
            return logits
        drawn = F.gumbel_softmax(logits, self.temperature, dim=1)
        shares = logits.softmax(1).mean((0, 2, 3))
        uneven = (shares * (shares * self.vocab_size).clamp_min(1e-9).log()).sum()
        return {"loss_pixels": F.mse_loss(self.decoder(drawn), inputs), "loss_spread": self.spread * uneven}
