"""timm's Transformer layers with a forward pass for both streams; needs timm."""

import torch
from jaxtyping import Float
from timm.layers import AttentionRope, apply_rot_embed_cat
from timm.layers.attention import Attention
from timm.models.eva import EvaAttention, EvaBlock
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from mapet_mm.models.utils.layout import Layout
from mapet_mm.models.utils.two_stream import TwoStreamPass, attend_streams, project_heads

ATTENTIONS = (Attention, EvaAttention, AttentionRope)


class TwoStreamBlock(TwoStreamPass, Block):
    """timm's `Block`, with a forward pass for both streams."""

    def attention(
        self,
        tokens: Float[Tensor, "batch layout dim"],
        layout: Layout,
        first_row: int,
        positions: Tensor | None,
    ) -> Float[Tensor, "batch row dim"]:
        """What the attention branch adds."""
        update = attend_in_timm(self.attn, self.norm1(tokens), layout, first_row, positions)
        return self.drop_path1(self.ls1(update))

    def feed_forward(self, tokens: Float[Tensor, "batch row dim"]) -> Float[Tensor, "batch row dim"]:
        """The tokens with what the MLP adds."""
        return tokens + self.drop_path2(self.ls2(self.mlp(self.norm2(tokens))))


class TwoStreamEvaBlock(TwoStreamPass, EvaBlock):
    """timm's `EvaBlock`, with a forward pass for both streams."""

    def attention(
        self,
        tokens: Float[Tensor, "batch layout dim"],
        layout: Layout,
        first_row: int,
        positions: Tensor | None,
    ) -> Float[Tensor, "batch row dim"]:
        """What the attention branch adds."""
        update = attend_in_timm(self.attn, self.norm1(tokens), layout, first_row, positions)
        return self.drop_path1(_scaled(update, self.gamma_1))

    def feed_forward(self, tokens: Float[Tensor, "batch row dim"]) -> Float[Tensor, "batch row dim"]:
        """The tokens with what the MLP adds."""
        return tokens + self.drop_path2(_scaled(self.mlp(self.norm2(tokens)), self.gamma_2))


LAYERS: dict[type[nn.Module], type[TwoStreamPass]] = {Block: TwoStreamBlock, EvaBlock: TwoStreamEvaBlock}


def attend_in_timm(
    attention: nn.Module,
    normed: Float[Tensor, "batch layout dim"],
    layout: Layout,
    first_row: int,
    angles: Float[Tensor, "batch 1 layout two_channels"] | None,
) -> Float[Tensor, "batch row dim"]:
    """What one of timm's attention modules gives for the rows of the layout from `first_row` on.

    Args:
        attention: one of `ATTENTIONS`.
        normed: `(B, L, D)`.
        layout: the layout of the rows.
        first_row: the first row of the result.
        angles: `(B, 1, L, 2 d)`, sines and cosines of each row's place in the image; None without rotation.
    """
    queries, keys, values = _heads(attention, normed, layout, first_row)
    queries, keys = attention.q_norm(queries), attention.k_norm(keys)
    if angles is not None:
        half = attention.rotate_half
        queries = apply_rot_embed_cat(queries, angles[:, :, first_row:], half=half).type_as(values)
        keys = apply_rot_embed_cat(keys, angles[:, :, : layout.num_keys], half=half).type_as(values)
    if (groups := getattr(attention, "num_kv_groups", 1)) > 1:  # grouped-query attention
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
    dropout = attention.attn_drop.p if attention.training else 0.0
    rows = attend_streams(queries, keys, values, layout, first_row, dropout, scale=attention.scale)
    return attention.proj_drop(attention.proj(attention.norm(rows)))


def _heads(attention: nn.Module, normed: Tensor, layout: Layout, first_row: int) -> tuple[Tensor, ...]:
    if attention.qkv is not None:
        bias_apart = None
        if getattr(attention, "q_bias", None) is not None:
            bias_apart = torch.cat([attention.q_bias, attention.k_bias, attention.v_bias])
        return project_heads(normed, attention.qkv, attention.num_heads, layout, first_row, bias_apart)
    asking, content = normed[:, first_row:], normed[:, : layout.num_keys]
    apart = attention.q_proj(asking), attention.k_proj(content), attention.v_proj(content)
    # B L (H d) -> B H L d
    return tuple(x.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for x in apart)


def _scaled(update: Tensor, layer_scale: Tensor | None) -> Tensor:
    return update if layer_scale is None else layer_scale * update
