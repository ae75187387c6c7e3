"""One Transformer layer over the layout `C | M | T | Q` (see :mod:`mapet_mm.models.objectives`)."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from mmcv.cnn.bricks.transformer import FFN
from mmpretrain.models.backbones.vision_transformer import TransformerEncoderLayer
from torch import Tensor, nn
from torch.nn import functional as F

from mapet_mm.models.attention import attend, takes_products
from mapet_mm.models.recomputation import recomputed


class Layout(NamedTuple):
    """Where the groups are.

    Args:
        num_dense: rows of C and M, which see each other in full and nothing else.
        num_keys: rows of C, M and T, which give keys and values.
        bias: `(stream, num_keys)`, for each row of T and Q 0 where it sees a key, else minus infinity.
    """

    num_dense: int
    num_keys: int
    bias: Tensor


class TwoStreamLayer(TransformerEncoderLayer):
    """MMPretrain's layer with a forward pass for both streams; its parameters and their names stay.

    Stochastic depth acts on the whole layout: one draw per image and branch, shared by the streams.
    """

    def forward(
        self,
        tokens: Float[Tensor, "batch layout dim"],
        layout: Layout | None = None,
        first_row: int = 0,
        recompute: bool = False,
    ) -> Float[Tensor, "batch row dim"]:
        """The layer's output for the rows of the layout from `first_row` on.

        Args:
            tokens: `(B, L, D)`.
            layout: the layout of the rows; None for a plain ViT's pass, all rows seeing each other.
            first_row: the first row of the result.
            recompute: compute the activation again in the backward pass instead of keeping it, and LayerNorm
                where it would be kept as a copy in autocast's precision.
        """
        if layout is None:
            return super().forward(tokens)
        update = self._attention(tokens, layout, first_row, recompute)
        if first_row:  # the gradient of a slice is a copy, even of all rows
            tokens = tokens[:, first_row:]
        tokens = tokens + self.attn.out_drop(update)
        if not isinstance(self.ffn, FFN) or len(self.ffn.layers) != 3:  # `layer_cfgs` asks for another MLP
            return self.ffn(self.ln2(tokens), identity=tokens)
        return tokens + self.ffn.dropout_layer(self._feed_forward(tokens, recompute))

    def _attention(
        self, tokens: Float[Tensor, "batch layout dim"], layout: Layout, first_row: int, recompute: bool
    ) -> Float[Tensor, "batch row dim"]:
        """Two-stream attention (paper, Eq. 3) with its projection and LayerScale.

        Queries are computed for the rows from `first_row` on only, keys and values for C, M and T only.
        """
        attention = self.attn
        queries, keys, values = self._project(tokens, layout.num_keys, first_row, recompute)
        dropout = attention.attn_drop if self.training else 0.0
        num_dense_rows = max(layout.num_dense - first_row, 0)
        num_stream_rows = queries.shape[2] - num_dense_rows
        # Split, not sliced: the gradient is then one copy instead of sums into zeros.
        dense_queries, stream_queries = queries.split([num_dense_rows, num_stream_rows], dim=2)
        if takes_products(keys):  # copied once for both calls, not in each
            keys, values = keys.contiguous(), values.contiguous()
        attended = []
        if num_dense_rows:
            dense_keys, dense_values = keys[:, :, : layout.num_dense], values[:, :, : layout.num_dense]
            attended.append(attend(dense_queries, dense_keys, dense_values, dropout=dropout))
        if num_stream_rows:
            attended.append(attend(stream_queries, keys, values, layout.bias[-num_stream_rows:], dropout))
        # B H L d -> B L (H d); the kernels already write it in this order.
        rows = torch.cat([x.transpose(1, 2) for x in attended], dim=1).flatten(2)
        return attention.proj_drop(F.linear(rows, *_scaled(attention.proj, attention.gamma1)))

    def _project(
        self, tokens: Float[Tensor, "batch layout dim"], num_keys: int, first_row: int, recompute: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries from `first_row` on, keys and values of the first `num_keys` rows; `(B, H, R, d)` each."""
        attention, dim, dtype = self.attn, tokens.shape[-1], _product_dtype(tokens)
        query_weight, key_value_weight = attention.qkv.weight.split([dim, 2 * dim])
        shift = attention.qkv.bias
        query_shift, key_value_shift = (None, None) if shift is None else shift.split([dim, 2 * dim])

        def normed_rows() -> Tensor:
            return self.ln1(tokens).to(dtype)

        def asking(rows: Tensor) -> Tensor:
            return rows[:, first_row:].contiguous() if first_row else rows

        def content(rows: Tensor) -> Tensor:
            return rows.split([num_keys, rows.shape[1] - num_keys], dim=1)[0].contiguous()

        normed = normed_rows()
        asking_rows, content_rows = asking(normed), content(normed)
        remake = (asking_rows, lambda: asking(normed_rows())), (content_rows, lambda: content(normed_rows()))
        with recomputed(*remake, when=recompute and dtype is not tokens.dtype):
            queries = F.linear(asking_rows, query_weight, query_shift)
            keys, values = F.linear(content_rows, key_value_weight, key_value_shift).chunk(2, dim=-1)
        # B L (H d) -> B H L d
        return tuple(
            x.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for x in (queries, keys, values)
        )

    def _feed_forward(
        self, tokens: Float[Tensor, "batch row dim"], recompute: bool
    ) -> Float[Tensor, "batch row dim"]:
        """The MLP of two linear layers with its LayerNorm and LayerScale."""
        (first, activate, first_drop), second, second_drop = self.ffn.layers
        dtype = _product_dtype(tokens)

        def normed_rows() -> Tensor:
            return self.ln2(tokens).to(dtype)

        normed = normed_rows()
        with recomputed((normed, normed_rows), when=recompute and dtype is not tokens.dtype):
            hidden = F.linear(normed, first.weight, first.bias)
        active = activate(hidden)
        # With dropout in between, the second layer's input is not the activation.
        with recomputed((active, lambda: activate(hidden)), when=recompute):
            return second_drop(F.linear(first_drop(active), *_scaled(second, self.ffn.gamma2)))


def _scaled(linear: nn.Linear, layer_scale: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight and bias of a linear layer with the LayerScale behind it: no product over the tokens."""
    if isinstance(layer_scale, nn.Identity):
        return linear.weight, linear.bias
    return linear.weight * layer_scale.weight[:, None], linear.bias * layer_scale.weight


def _product_dtype(tokens: Tensor) -> torch.dtype:
    device = tokens.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tokens.dtype
