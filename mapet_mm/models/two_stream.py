"""One Transformer layer over the layout `C | M | T | Q` (see `mapet_mm.models.objectives`)."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from mmcv.cnn.bricks.transformer import FFN
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mapet_mm.models.attention import attend, takes_products
from mapet_mm.models.encoder_layer import EncoderLayer
from mapet_mm.models.layout import Layout
from mapet_mm.models.precision import product_dtype
from mapet_mm.models.recomputation import linears


class TwoStreamLayer(EncoderLayer):
    """MMPretrain's layer with a forward pass for both streams; its parameters and their names stay.

    Stochastic depth acts on the whole layout: one draw per image and branch, shared by the streams.
    """

    # Compute GELU again in the backward pass instead of keeping its result, and LayerNorm where it would be
    # kept as a copy in autocast's precision.
    recompute = False

    def forward(
        self,
        tokens: Float[Tensor, "batch layout dim"],
        layout: Layout | None = None,
        first_row: int = 0,
    ) -> Float[Tensor, "batch row dim"]:
        """The layer's output for the rows of the layout from `first_row` on.

        Args:
            tokens: `(B, L, D)`.
            layout: the layout of the rows; None for a plain ViT's pass, all rows seeing each other.
            first_row: the first row of the result.

        Raises:
            ValueError: the tokens are not those of the layout.
        """
        if layout is None:
            return super().forward(tokens)
        if tokens.shape[1] != layout.num_rows:
            raise ValueError(
                f"{tokens.shape[1]} rows of tokens, but the layout has {layout.num_rows}: "
                f"{dict(zip(layout.objective.groups, layout.sizes, strict=True))}"
            )
        if self.with_cp and torch.is_grad_enabled():
            return checkpoint(self._run, tokens, layout, first_row, False, use_reentrant=False)
        # A compiler settles by itself what to compute again.
        return self._run(tokens, layout, first_row, self.recompute and not torch.compiler.is_compiling())

    def _run(
        self, tokens: Float[Tensor, "batch layout dim"], layout: Layout, first_row: int, recompute: bool
    ) -> Float[Tensor, "batch row dim"]:
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
        bias = layout.bias[max(first_row - layout.num_dense, 0) :]
        dropout = attention.attn_drop if self.training else 0.0
        num_dense_rows = max(layout.num_dense - first_row, 0)
        num_stream_rows = queries.shape[2] - num_dense_rows
        if len(bias) != num_stream_rows:
            raise ValueError(f"a mask of {len(bias)} rows for {num_stream_rows} rows of T and Q")
        # Split, not sliced: the gradient is then one copy instead of sums into zeros.
        dense_queries, stream_queries = queries.split([num_dense_rows, num_stream_rows], dim=2)
        if takes_products(keys):  # copied once for both calls, not in each
            keys, values = keys.contiguous(), values.contiguous()
        attended = []
        if num_dense_rows:
            dense_keys, dense_values = keys[:, :, : layout.num_dense], values[:, :, : layout.num_dense]
            attended.append(attend(dense_queries, dense_keys, dense_values, dropout=dropout))
        if num_stream_rows:
            attended.append(attend(stream_queries, keys, values, bias, dropout))
        # B H L d -> B L (H d); the kernels already write it in this order.
        rows = torch.cat([x.transpose(1, 2) for x in attended], dim=1).flatten(2)
        return attention.proj_drop(F.linear(rows, *_scaled(attention.proj, attention.gamma1)))

    def _project(
        self, tokens: Float[Tensor, "batch layout dim"], num_keys: int, first_row: int, recompute: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries from `first_row` on, keys and values of the first `num_keys` rows; `(B, H, R, d)` each."""
        attention, dim = self.attn, tokens.shape[-1]
        query_weight, key_value_weight = attention.qkv.weight.split([dim, 2 * dim])
        shift = attention.qkv.bias
        query_shift, key_value_shift = (None, None) if shift is None else shift.split([dim, 2 * dim])
        normed, make = _normed(self.ln1, tokens, recompute)
        queries, keys_and_values = linears(
            normed,
            (slice(first_row, None), query_weight, query_shift),
            (slice(num_keys), key_value_weight, key_value_shift),
            make=make,
        )
        # B L (H d) -> B H L d
        return tuple(
            x.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
            for x in (queries, *keys_and_values.chunk(2, dim=-1))
        )

    def _feed_forward(
        self, tokens: Float[Tensor, "batch row dim"], recompute: bool
    ) -> Float[Tensor, "batch row dim"]:
        """The MLP of two linear layers with its LayerNorm and LayerScale."""
        (first, activate, first_drop), second, second_drop = self.ffn.layers
        normed, make = _normed(self.ln2, tokens, recompute)
        (hidden,) = linears(normed, (slice(None), first.weight, first.bias), make=make)
        active = first_drop(activate(hidden))
        # Dropout would drop others when it is made again.
        again = recompute and not (first_drop.p and first_drop.training)
        scaled = (slice(None), *_scaled(second, self.ffn.gamma2))
        return second_drop(*linears(active, scaled, make=(lambda: activate(hidden)) if again else None))


def _normed(norm: nn.Module, tokens: Tensor, recompute: bool) -> tuple[Tensor, Callable[[], Tensor] | None]:
    """LayerNorm's result in the precision of products; and how to make it again, if that is to be."""
    dtype = product_dtype(tokens)

    def make() -> Tensor:
        return norm(tokens).to(dtype)

    # In the tokens' own precision LayerNorm's result is no copy of anything.
    return make(), make if recompute and dtype is not tokens.dtype else None


def _scaled(linear: nn.Linear, layer_scale: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight and bias of a linear layer with the LayerScale behind it: no product over the tokens."""
    if isinstance(layer_scale, nn.Identity):
        return linear.weight, linear.bias
    return linear.weight * layer_scale.weight[:, None], linear.bias * layer_scale.weight
