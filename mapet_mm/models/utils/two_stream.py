"""One Transformer layer over the layout `C | M | T | Q` (see `mapet_mm.models.utils.objectives`)."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from mmcv.cnn import Linear
from mmcv.cnn.bricks.scale import LayerScale as ScaleOfMLP
from mmcv.cnn.bricks.transformer import FFN
from mmpretrain.models.utils import LayerScale
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mapet_mm.models.utils.attention import attend, takes_products
from mapet_mm.models.utils.encoder_layer import EncoderLayer
from mapet_mm.models.utils.layout import Layout
from mapet_mm.models.utils.plain_modules import is_plain
from mapet_mm.models.utils.precision import product_dtype
from mapet_mm.models.utils.recomputation import linears

# MMCV's and MMPretrain's own classes beside PyTorch's.
LINEAR = (nn.Linear, Linear)
LAYER_SCALE = (LayerScale, ScaleOfMLP)


class TwoStreamPass(nn.Module):
    """A layer's forward pass for both streams, for the Transformer layer of any library.

    A subclass names the library's layer as its second base and keeps that layer's parameters and their
    names. It offers the two residual branches, norms, projections, scale and stochastic depth included:

    - `attention(tokens, layout, first_row, positions)`: what attention adds to the rows from `first_row` on;
      the norm, `project_heads`, `attend_streams` and the way back are its parts.
    - `feed_forward(tokens)`: the tokens with what the MLP adds.

    Apart from `attend_streams` both have to compute each row by itself. Stochastic depth then acts on the
    whole layout: one draw per image and branch, shared by the streams.
    """

    with_cp = False  # keep only the input for the backward pass and run the layer again there

    def forward(self, tokens: Float[Tensor, "batch row dim"], *args: Any, **kwargs: Any) -> Tensor:
        """Of a layout the output of `two_streams`; else the library's, all rows seeing each other."""
        if args and isinstance(args[0], Layout):
            return self.two_streams(tokens, *args, **kwargs)
        return super().forward(tokens, *args, **kwargs)

    def two_streams(
        self,
        tokens: Float[Tensor, "batch layout dim"],
        layout: Layout,
        first_row: int = 0,
        positions: Any = None,
    ) -> Float[Tensor, "batch row dim"]:
        """The layer's output for the rows of the layout from `first_row` on.

        Args:
            tokens: `(B, L, D)`.
            layout: the layout of the rows.
            first_row: the first row of the result.
            positions: what the attention takes of the rows' places in the image; None if nothing.

        Raises:
            ValueError: the tokens are not those of the layout.
        """
        if tokens.shape[1] != layout.num_rows:
            raise ValueError(
                f"{tokens.shape[1]} rows of tokens, but the layout has {layout.num_rows}: "
                f"{dict(zip(layout.objective.groups, layout.sizes, strict=True))}"
            )
        if self.with_cp and torch.is_grad_enabled():
            return checkpoint(self._run, tokens, layout, first_row, positions, use_reentrant=False)
        return self._run(tokens, layout, first_row, positions)

    def _run(
        self, tokens: Float[Tensor, "batch layout dim"], layout: Layout, first_row: int, positions: Any
    ) -> Float[Tensor, "batch row dim"]:
        update = self.attention(tokens, layout, first_row, positions)
        if first_row:  # the gradient of a slice is a copy, even of all rows
            tokens = tokens[:, first_row:]
        return self.feed_forward(tokens + update)


class TwoStreamLayer(TwoStreamPass, EncoderLayer):
    """MMPretrain's layer, with a forward pass for both streams.

    The linear layers are computed from their parameters: keys and values of some rows only, with LayerScale
    in the weights. One that is no plain linear layer (LoRA) or has hooks is called as a module instead, on
    all rows. Hooks on `attn` never run, because it is never called as a whole, and neither do PyTorch's
    global ones on what is not called; with `recompute`, those on norms may run again in the backward pass.
    """

    # Compute GELU again in the backward pass instead of keeping its result, and LayerNorm where it would be
    # kept as a copy in autocast's precision.
    recompute = False

    @property
    def _recomputes(self) -> bool:
        if not (self.recompute and self.training and torch.is_grad_enabled()):
            return False
        # Checkpointing and compilers settle by themselves what to compute again; a trace is kept as a file.
        return not (self.with_cp or torch.compiler.is_compiling() or torch.jit.is_tracing())

    def attention(
        self, tokens: Float[Tensor, "batch layout dim"], layout: Layout, first_row: int, positions: None
    ) -> Float[Tensor, "batch row dim"]:
        """What the attention branch adds."""
        attention = self.attn
        normed, make = _normed(self.ln1, tokens, self._recomputes)
        heads = project_heads(normed, attention.qkv, attention.num_heads, layout, first_row, make=make)
        rows = attend_streams(*heads, layout, first_row, attention.attn_drop if self.training else 0.0)
        if _can_scale(attention.proj, attention.gamma1):
            update = attention.proj_drop(F.linear(rows, *_scaled(attention.proj, attention.gamma1)))
        else:
            update = attention.gamma1(attention.proj_drop(attention.proj(rows)))
        return attention.out_drop(update)

    def feed_forward(self, tokens: Float[Tensor, "batch row dim"]) -> Float[Tensor, "batch row dim"]:
        """The tokens with what the MLP adds."""
        if not self._has_plain_mlp():
            return self.ffn(self.ln2(tokens), identity=tokens)
        return tokens + self.ffn.dropout_layer(self._mlp(tokens))

    def _has_plain_mlp(self) -> bool:
        """Whether the MLP is two plain linear layers; `layer_cfgs` can ask for another."""
        ffn = self.ffn
        if not is_plain(ffn, FFN) or len(ffn.layers) != 3:
            return False
        hidden, second, _ = ffn.layers
        sequences = all(is_plain(one, nn.Sequential) for one in (ffn.layers, hidden))
        return sequences and is_plain(hidden[0], *LINEAR) and _can_scale(second, ffn.gamma2)

    def _mlp(self, tokens: Float[Tensor, "batch row dim"]) -> Float[Tensor, "batch row dim"]:
        """The MLP of two linear layers with its LayerNorm and LayerScale."""
        recompute = self._recomputes
        (first, activate, first_drop), second, second_drop = self.ffn.layers
        normed, make = _normed(self.ln2, tokens, recompute)
        (hidden,) = linears(normed, (slice(None), first.weight, first.bias), make=make)
        active = first_drop(activate(hidden))
        # Dropout would drop others when it is made again.
        again = recompute and not (first_drop.p and first_drop.training)
        scaled = (slice(None), *_scaled(second, self.ffn.gamma2))
        return second_drop(*linears(active, scaled, make=(lambda: activate(hidden)) if again else None))


def project_heads(
    normed: Float[Tensor, "batch layout dim"],
    qkv: nn.Module,
    num_heads: int,
    layout: Layout,
    first_row: int,
    bias: Float[Tensor, " three_dims"] | None = None,
    make: Callable[[], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of the rows from `first_row` on, keys and values of C, M and T only; `(B, H, R, d)` each.

    Args:
        normed: `(B, L, D)`.
        qkv: the linear layer of queries, keys and values, side by side.
        num_heads: `H`.
        layout: the layout of the rows.
        first_row: the first row that asks.
        bias: what to add to its results, if a library keeps that apart.
        make: as in `linears`.
    """
    asking, content = slice(first_row, None), slice(layout.num_keys)
    if is_plain(qkv, *LINEAR):
        dim = len(qkv.weight) // 3
        query_weight, key_value_weight = qkv.weight.split([dim, 2 * dim])
        bias = qkv.bias if bias is None else bias
        query_shift, key_value_shift = (None, None) if bias is None else bias.split([dim, 2 * dim])
        queries, keys_and_values = linears(
            normed,
            (asking, query_weight, query_shift),
            (content, key_value_weight, key_value_shift),
            make=make,
        )
    else:
        joint = qkv(normed) if bias is None else qkv(normed) + bias
        dim = joint.shape[-1] // 3
        queries, keys_and_values = joint[:, asking, :dim], joint[:, content, dim:]
    # B L (H d) -> B H L d
    return tuple(
        x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (queries, *keys_and_values.chunk(2, dim=-1))
    )


def attend_streams(
    queries: Float[Tensor, "batch head row channel"],
    keys: Float[Tensor, "batch head key channel"],
    values: Float[Tensor, "batch head key channel"],
    layout: Layout,
    first_row: int,
    dropout: float = 0.0,
    bias: Float[Tensor, "batch head row key"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "batch row dim"]:
    """Two-stream attention (paper, Eq. 3): C and M among themselves, T and Q behind one mask.

    Args:
        queries: `(B, H, R, d)`, of the rows from `first_row` on.
        keys: `(B, H, K, d)`, of C, M and T.
        values: `(B, H, K, d)`.
        layout: the layout of the rows.
        first_row: the first row that asks.
        dropout: probability of dropping an attention weight.
        bias: `(B, H, R, K)`, added to the scores of each image and head, as of relative positions.
        scale: of the scores; by default `d ** -0.5`.
    """
    mask = layout.bias[max(first_row - layout.num_dense, 0) :]
    num_dense_rows = max(layout.num_dense - first_row, 0)
    num_stream_rows = queries.shape[2] - num_dense_rows
    if len(mask) != num_stream_rows:
        raise ValueError(f"a mask of {len(mask)} rows for {num_stream_rows} rows of T and Q")
    # Split, not sliced: the gradient is then one copy instead of sums into zeros.
    dense_queries, stream_queries = queries.split([num_dense_rows, num_stream_rows], dim=2)
    dense_bias = None
    if bias is not None:
        dense_bias, stream_bias = bias.split([num_dense_rows, num_stream_rows], dim=2)
        dense_bias, mask = dense_bias[..., : layout.num_dense], stream_bias + mask
    if takes_products(keys):  # copied once for both calls, not in each
        keys, values = keys.contiguous(), values.contiguous()
    attended = []
    if num_dense_rows:
        dense_keys, dense_values = keys[:, :, : layout.num_dense], values[:, :, : layout.num_dense]
        attended.append(attend(dense_queries, dense_keys, dense_values, dense_bias, dropout, scale=scale))
    if num_stream_rows:
        attended.append(attend(stream_queries, keys, values, mask, dropout, scale=scale))
    # B H L d -> B L (H d); the kernels already write it in this order.
    return torch.cat([x.transpose(1, 2) for x in attended], dim=1).flatten(2)


def _normed(norm: nn.Module, tokens: Tensor, recompute: bool) -> tuple[Tensor, Callable[[], Tensor] | None]:
    """LayerNorm's result in the precision of products; and how to make it again, if that is to be."""
    dtype = product_dtype(tokens)

    def make() -> Tensor:
        return norm(tokens).to(dtype)

    # In the tokens' own precision LayerNorm's result is no copy of anything.
    return make(), make if recompute and dtype is not tokens.dtype else None


def _can_scale(linear: nn.Module, layer_scale: nn.Module) -> bool:
    """Whether `_scaled` gives what calling the two modules one behind the other does."""
    return is_plain(linear, *LINEAR) and is_plain(layer_scale, *LAYER_SCALE, nn.Identity)


def _scaled(linear: nn.Linear, layer_scale: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight and bias of a linear layer with the LayerScale behind it: no product over the tokens."""
    if isinstance(layer_scale, nn.Identity):
        return linear.weight, linear.bias
    return linear.weight * layer_scale.weight[:, None], linear.bias * layer_scale.weight
