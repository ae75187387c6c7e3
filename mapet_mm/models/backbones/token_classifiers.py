"""Backbones of classifiers that see only an image's visual tokens (paper, Section 5.3, tokenizer study).

Grids come as `(B, H, W)` or, as a pipeline packs them, `(B, 1, H, W)`; MMPretrain's data preprocessor hands
them on as floats.
"""

from collections.abc import Iterable
from typing import SupportsIndex

from jaxtyping import Float, Shaped
from mmengine.model import BaseModule
from torch import Tensor, nn
from torch.nn import functional as F

from mapet_mm.models.backbones.vit import MaPeTViT
from mapet_mm.registry import MODELS


@MODELS.register_module()
class TokenMLP(BaseModule):
    """Embedding -> linear -> ReLU -> mean over the grid; a linear head classifies the mean.

    Args:
        vocab_size: number of token ids.
        embed_dims: dimension of embedding and linear layer; the paper's is 192.
        **kwargs: as for any MMEngine module: `init_cfg`.

    Examples:
        >>> (features,) = TokenMLP(vocab_size=8192)(torch.randint(8192, (2, 14, 14)))
        >>> features.shape
        torch.Size([2, 192])
    """

    def __init__(self, vocab_size: int, embed_dims: int = 192, **kwargs) -> None:
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.embedding = nn.Embedding(vocab_size, embed_dims)
        self.linear = nn.Linear(embed_dims, embed_dims)

    def forward(
        self, token_grids: Shaped[Tensor, "batch *channel height width"]
    ) -> tuple[Float[Tensor, "batch dim"]]:
        """Features `(B, D)` of token grids."""
        return (F.relu(self.linear(self.embedding(token_grids.flatten(1).long()))).mean(1),)


@MODELS.register_module()
class OneHotTokens(BaseModule):
    """The tokens themselves as features: for each position, its token id as a one-hot vector.

    Nothing is learned, so probes of it measure the tokens alone; a pre-training on them adds the difference.

    Args:
        vocab_size: number of token ids.

    Examples:
        >>> (features,) = OneHotTokens(vocab_size=3)(torch.tensor([[[2, 0]]]))
        >>> features
        tensor([[0., 0., 1., 1., 0., 0.]])
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def forward(
        self, token_grids: Shaped[Tensor, "batch *channel height width"]
    ) -> tuple[Float[Tensor, "batch place_and_token"]]:
        """Features `(B, HW * vocab_size)` of token grids."""
        return (F.one_hot(token_grids.flatten(1).long(), self.vocab_size).flatten(1).float(),)


@MODELS.register_module()
class TokenViT(MaPeTViT):
    """A ViT over token embeddings instead of patch embeddings.

    Args:
        vocab_size: number of token ids.
        grid: tokens per side, or (rows, columns).
        arch: as for `MaPeTViT`; the paper's is ViT-T.
        **kwargs: as for `MaPeTViT`, without `img_size` and `patch_size`.

    Examples:
        >>> (features,) = TokenViT(vocab_size=8192, grid=14)(torch.randint(8192, (2, 14, 14)))
        >>> features.shape
        torch.Size([2, 192])
    """

    patch_stride = (1, 1)

    def __init__(
        self,
        vocab_size: int,
        grid: SupportsIndex | Iterable[SupportsIndex] = 14,
        arch: str | dict = "deit-tiny",
        **kwargs,
    ) -> None:
        super().__init__(arch, img_size=grid, patch_size=1, **kwargs)
        self.vocab_size = vocab_size
        self.patch_embed = TokenEmbedding(vocab_size, self.embed_dims)

    def draw_weights(self) -> None:
        super().draw_weights()
        nn.init.normal_(self.patch_embed.weight, std=0.02)


class TokenEmbedding(nn.Embedding):
    """Stands where a ViT's patch embedding does: embeddings `(B, HW, D)`, and the grid's size."""

    def forward(
        self, token_grids: Shaped[Tensor, "batch *channel height width"]
    ) -> tuple[Float[Tensor, "batch token dim"], tuple[int, int]]:
        return super().forward(token_grids.flatten(1).long()), tuple(token_grids.shape[-2:])
