"""Masked image modeling with an encoder that sees the visible patches alone; an extension of the method."""

import torch
from jaxtyping import Float, Int64
from mmcv.cnn.bricks.transformer import FFN
from mmengine.model import BaseModule
from mmpretrain.models.utils import build_2d_sincos_position_embedding
from torch import Tensor, nn

from mapet_mm.models.backbones.vit import init_truncated_normal
from mapet_mm.models.selfsup.mapet import MaPeT
from mapet_mm.registry import MODELS


class CrossAttentionLayer(nn.Module):
    """A Transformer layer whose rows attend to the context and not to each other.

    Args:
        embed_dims: width of rows and context.
        num_heads: heads of the attention.
    """

    def __init__(self, embed_dims: int, num_heads: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(embed_dims, eps=1e-6)
        self.attn = nn.MultiheadAttention(embed_dims, num_heads, batch_first=True)
        self.ln2 = nn.LayerNorm(embed_dims, eps=1e-6)
        self.ffn = FFN(embed_dims, 4 * embed_dims, act_cfg=dict(type="GELU"))

    def forward(
        self, rows: Float[Tensor, "batch target dim"], context: Float[Tensor, "batch context dim"]
    ) -> Float[Tensor, "batch target dim"]:
        """The rows after attention to the context, which has been through a norm, and the MLP."""
        update, _ = self.attn(self.ln1(rows), context, context, need_weights=False)
        rows = rows + update
        return self.ffn(self.ln2(rows), identity=rows)


@MODELS.register_module()
class CrossAttentionPredictor(BaseModule):
    """Predicts the latents of hidden patches from those of the visible ones, each patch by itself.

    Args:
        embed_dims: width, the encoder's.
        num_layers: cross-attention layers.
        num_heads: heads of each; its MLP's hidden layer is four times as wide as the predictor.
        **kwargs: as for any MMEngine module: `init_cfg`.

    Examples:
        >>> predictor = CrossAttentionPredictor(embed_dims=192, num_layers=2, num_heads=3)
        >>> queries, context = torch.randn(2, 147, 192), torch.randn(2, 50, 192)
        >>> predictor(queries, context).shape
        torch.Size([2, 147, 192])
    """

    def __init__(
        self,
        embed_dims: int,
        num_layers: int,
        num_heads: int,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.layers = nn.ModuleList(CrossAttentionLayer(embed_dims, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(embed_dims, eps=1e-6)

    def init_weights(self) -> None:
        """Initialise as the backbone, then as `init_cfg` says; only once, as MMEngine's modules do."""
        if not self.is_init:
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    init_truncated_normal(module.weight)
                    nn.init.zeros_(module.bias)
                elif isinstance(module, nn.MultiheadAttention):
                    init_truncated_normal(module.in_proj_weight)
        super().init_weights()

    def forward(
        self, queries: Float[Tensor, "batch target dim"], context: Float[Tensor, "batch context dim"]
    ) -> Float[Tensor, "batch target dim"]:
        """Latents of the hidden patches, from queries that say where each of them is."""
        for layer in self.layers:
            queries = layer(queries, context)
        return self.norm(queries)


@MODELS.register_module()
class VisibleMIM(MaPeT):
    """Predict the tokens of hidden patches from an encoder that never sees a mask token.

    The ViT runs on the context alone, as in masked autoencoders; `neck` predicts the hidden patches by
    cross-attention, as in CAPI (arXiv 2502.08769). So the encoder works on images as it will downstream, and
    a step costs less: its cost falls with the share of hidden patches. This is an extension, not MaPeT.

    A query is the backbone's mask token plus the fixed sines and cosines of the hidden patch's position.

    Args:
        backbone: any `MaPeTPretrain...` with the objective 'context'; its `cutting_point` is the number of
            visible tokens.
        neck: a `CrossAttentionPredictor` of the backbone's width.
        **kwargs: as for `MaPeT`: `head`, `target_generator`, `data_preprocessor`, `context_loss`, ...

    Raises:
        ValueError: as for `MaPeT`.

    Examples:
        >>> vit = dict(type="mapet_mm.MaPeTPretrainViT", arch="deit-tiny", img_size=32, cutting_point=3)
        >>> sizes = dict(embed_dims=192, num_layers=2, num_heads=3)
        >>> model = VisibleMIM(
        ...     backbone=dict(vit, objective="context"),
        ...     neck=dict(type="mapet_mm.CrossAttentionPredictor", **sizes),
        ...     head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=192, vocab_size=64),
        ...     target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=64),
        ...     context_loss=0.5,
        ... )
        >>> images, token_grids = torch.randn(2, 3, 32, 32), torch.randint(64, (2, 2, 2))
        >>> losses = model([images, token_grids], mode="loss")
        >>> sorted(losses)
        ['context_accuracy', 'context_nats', 'loss', 'target_nats', 'token_accuracy']
    """

    encodes_context_only = True

    def __init__(self, backbone: dict, neck: dict, **kwargs) -> None:
        super().__init__(backbone=backbone, neck=neck, **kwargs)
        rows, columns = self.backbone.patch_resolution
        # MMPretrain's runs down the columns first, so with both exchanged it runs along the rows.
        positions = build_2d_sincos_position_embedding((columns, rows), self.backbone.embed_dims)
        self.register_buffer("query_positions", positions[0], persistent=False)  # N-e D

    def latents(
        self, images: Tensor, permutation: Tensor | None, with_context: bool = False
    ) -> tuple[Float[Tensor, "batch patch dim"], Int64[Tensor, "batch token"]]:
        """What the head gets, and the permutation: see `MaPeT.latents`."""
        context, permutation = self.backbone(images, permutation)  # B c D, B N
        extra = self.backbone.num_extra_tokens
        hidden = permutation[:, self.backbone.cutting_point :] - extra
        queries = self.backbone.mask_token + self.query_positions[hidden]  # B n D
        latents = self.neck(queries, context)
        if with_context:
            latents = torch.cat([context[:, extra:], latents], dim=1)  # B N-e D
        return latents, permutation
