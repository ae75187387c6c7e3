"""One Transformer layer over the layout `C | M | T | Q` (see `mapet_mm.models.utils.objectives`)."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from mmcv.cnn import Linear
from mmcv.cnn.bricks import DropPath
from mmengine.model import BaseModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.utils.checkpoint import checkpoint

from mapet_mm.models.utils.attention import attend, uses_bmm
from mapet_mm.models.utils.layout import Layout
from mapet_mm.utils.precision import product_dtype


class TwoStreamLayer(BaseModule):
    """A Transformer layer for whole images or for both streams, made of the parts of a library's layer.

    Calling it runs the library's layer on whole images; `two_streams` runs it on the layout. The parts keep
    their names, so weights load into the library's own layer and back. A subclass for each library's layer
    offers the residual branches, with norms, LayerScale and stochastic depth:

    - `plain_attention(tokens, ...)`: the update of all rows by attention, all seeing each other;
    - `attention(tokens, layout, first_row, positions)`: the update of the rows from `first_row` on, by way of
      `project_heads` and `attend_streams`;
    - `feed_forward(tokens)`: the tokens with the update of the MLP.

    Apart from `attend_streams`, the last two have to compute each row by itself. Stochastic depth then acts
    on the whole layout: one draw per image and branch, shared by the streams.

    Args:
        layer: the library's layer; its parts are taken, not copied.
        with_cp: keep only the input for the backward pass and run the layer again there.
    """

    def __init__(self, layer: nn.Module, with_cp: bool = False) -> None:
        super().__init__(getattr(layer, "init_cfg", None))
        for name, part in [*layer.named_parameters(recurse=False), *layer.named_children()]:
            setattr(self, name, part)
        self.with_cp = with_cp
        for module in self.modules():
            if isinstance(module, DropPath):  # with a NumPy scalar, on which torch.compile breaks its graph
                module.drop_prob = float(module.drop_prob)

    def forward(self, tokens: Float[Tensor, "batch row dim"], *args: Any, **kwargs: Any) -> Tensor:
        """The library's layer on whole images `(B, N, D)`; other arguments are the library's."""
        return self._checkpointed(self.plain, tokens, *args, **kwargs)

    def two_streams(
        self, tokens: Tensor, layout: Layout, first_row: int = 0, positions: Any = None
    ) -> Float[Tensor, "batch row dim"]:
        """The output for the layout's rows from `first_row` on; `positions` as the attention takes them.

        Args:
            tokens: all rows of the layout, `(B, L, D)`.
            layout: where each group is, and who sees whom.
            first_row: the first whose output is computed; all rows give keys and values.
            positions: of all rows, from the ViT's `attention_positions`.
        """
        return self._checkpointed(self._two_streams, tokens, layout, first_row, positions)

    def plain(self, tokens: Float[Tensor, "batch row dim"], *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output `(B, N, D)`, all tokens seeing each other; arguments as the library's layer."""
        return self.feed_forward(tokens + self.plain_attention(tokens, *args, **kwargs))

    def _two_streams(self, tokens: Tensor, layout: Layout, first_row: int, positions: Any) -> Tensor:
        update = self.attention(tokens, layout, first_row, positions)
        return self.feed_forward(tokens[:, first_row:] + update)

    def _checkpointed(self, run: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if self.with_cp and torch.is_grad_enabled():
            return checkpoint(run, *args, use_reentrant=False, **kwargs)
        return run(*args, **kwargs)


def is_plain_linear(module: Callable) -> bool:
    """True for a linear layer of PyTorch or MMCV, whose product may be computed in another way.

    Its weight may be a sum of `mapet_mm.models.utils.low_rank`.
    """
    return type_before_parametrizations(module) in (nn.Linear, Linear)


def project_heads(
    normed: Float[Tensor, "batch layout dim"],
    qkv: Callable[[Tensor], Tensor],
    num_heads: int,
    layout: Layout,
    first_row: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of the rows from `first_row` on, keys and values of C, M and T only; `(B, H, R, d)` each.

    A plain linear layer `qkv` computes only the rows that are needed, by two products; others, such as
    LoRA's, are called as they are.
    """
    if not is_plain_linear(qkv):
        return project_heads_of_all(qkv(normed), num_heads, layout, first_row)
    weight = qkv.weight  # looked up once: low-rank adapters add it up each time
    dim = len(weight) // 3
    query_weight, pair_weight = weight.split([dim, 2 * dim])
    query_bias = pair_bias = None
    if qkv.bias is not None:
        query_bias, pair_bias = qkv.bias.split([dim, 2 * dim])

    normed = normed.to(product_dtype(normed))  # once, not for each product
    query_rows = normed[:, first_row:]
    key_rows = normed[:, : layout.num_keys].contiguous()
    queries = F.linear(query_rows, query_weight, query_bias)  # B R D
    pairs = F.linear(key_rows, pair_weight, pair_bias)  # B K 2D

    keys, values = pairs.chunk(2, dim=-1)
    return split_heads(queries, num_heads), split_heads(keys, num_heads), split_heads(values, num_heads)


def project_heads_of_all(
    joint: Float[Tensor, "batch layout three_dims"], num_heads: int, layout: Layout, first_row: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values out of one product that has been computed for all rows."""
    dim = joint.shape[-1] // 3
    queries, pairs = joint.split([dim, 2 * dim], dim=-1)
    queries = queries[:, first_row:]  # B R D
    keys, values = pairs[:, : layout.num_keys].chunk(2, dim=-1)  # B K D
    return split_heads(queries, num_heads), split_heads(keys, num_heads), split_heads(values, num_heads)


def split_heads(rows: Float[Tensor, "batch row dim"], num_heads: int) -> Float[Tensor, "batch head row _"]:
    """`(B, R, H d) -> (B, H, R, d)`."""
    return rows.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def attend_streams(
    queries: Float[Tensor, "batch head row channel"],
    keys: Float[Tensor, "batch head key channel"],
    values: Float[Tensor, "batch head key channel"],
    layout: Layout,
    first_row: int,
    dropout: float,
) -> Float[Tensor, "batch row dim"]:
    """Two-stream attention (paper, Eq. 3): C and M among themselves, T and Q with one mask.

    Queries are of the rows from `first_row` on, keys and values of C, M and T.
    """
    # C and M attend densely, and come first; the mask is of the rows after them.
    num_dense_rows = max(layout.num_dense - first_row, 0)
    mask = layout.bias[max(first_row - layout.num_dense, 0) :]

    # Split, not sliced: the gradient is then one copy instead of sums into zeros.
    dense_queries, stream_queries = queries.split([num_dense_rows, len(mask)], dim=2)
    if uses_bmm(keys):  # copied once for both calls, not in each
        keys = keys.contiguous()
        values = values.contiguous()

    attended = []
    if num_dense_rows:  # C and M attend to C and M
        dense_keys = keys[:, :, : layout.num_dense]
        dense_values = values[:, :, : layout.num_dense]
        attended.append(attend(dense_queries, dense_keys, dense_values, None, dropout))
    if len(mask):  # T and Q attend to C, M and T, as the mask says
        attended.append(attend(stream_queries, keys, values, mask, dropout))
    # B H L d -> B L (H d); the kernels already write it in this order.
    return torch.cat([rows.transpose(1, 2) for rows in attended], dim=1).flatten(2)
