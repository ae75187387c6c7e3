"""The method for MMPretrain's other ViTs: BEiT with relative positions, EVA-02 with rotary ones.

Their parameters keep the library's names, so pre-trained weights load into the library's own class.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from mmpretrain.models.backbones import BEiTViT, ViTEVA02
from torch import Tensor, nn
from torch.nn import functional as F

from mapet_mm.models.backbones.checkpoint_hooks import fill_layer_scales
from mapet_mm.models.backbones.two_stream_vit import TwoStreamViT
from mapet_mm.models.utils.helpers import init_truncated_normal
from mapet_mm.models.utils.layout import Layout
from mapet_mm.models.utils.two_stream import TwoStreamLayer, attend_streams, project_heads
from mapet_mm.registry import MODELS


class _OtherViT(TwoStreamViT):
    """The part that MMPretrain's other ViTs share: layers of our type, made of the library's."""

    layer_type: type[TwoStreamLayer]

    def __init__(self, *, with_cp: bool = False, **kwargs: Any) -> None:
        super().__init__(out_type="raw", final_norm=True, **kwargs)
        for number, layer in enumerate(self.layers):
            self.layers[number] = self.layer_type(layer, with_cp)
        self.register_load_state_dict_pre_hook(fill_layer_scales)

    def init_weights(self) -> None:
        """Initialise as MMPretrain does; the mask token as the authors do."""
        if not self.is_init:
            init_truncated_normal(self.mask_token)
        super().init_weights()


class RelativePositions(NamedTuple):
    """The rows' places in each image, as BEiT's attention takes them.

    Args:
        steps: `(B, L, K)` int64, index of each row and key in a table of biases.
        shared: `(B, H, L, K)`, the bias that all layers share; None if each has its own or none.
    """

    steps: Tensor | None = None
    shared: Tensor | None = None


def relative_bias(
    table: Float[Tensor, "step head"], steps: Int64[Tensor, "batch row key"]
) -> Float[Tensor, "batch head row key"]:
    """The relative position biases of each image's rows and keys, looked up in BEiT's table."""
    return F.embedding(steps, table).permute(0, 3, 1, 2).contiguous()


class BEiTLayer(TwoStreamLayer):
    """BEiT's layer."""

    def init_weights(self) -> None:
        """Initialise as MMPretrain's layer does: the MLP's matrices by Xavier."""
        super().init_weights()
        for module in self.ffn.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.normal_(module.bias, std=1e-6)

    def plain_attention(
        self, tokens: Float[Tensor, "batch row dim"], rel_pos_bias: Tensor | None = None
    ) -> Float[Tensor, "batch row dim"]:
        """The update of whole images by attention."""
        return self._branch(self.attn(self.ln1(tokens), rel_pos_bias), 1)

    def attention(
        self,
        tokens: Float[Tensor, "batch layout dim"],
        layout: Layout,
        first_row: int,
        positions: RelativePositions,
    ) -> Float[Tensor, "batch row dim"]:
        """The update of both streams by attention."""
        attention = self.attn
        qkv_bias = None
        if attention.bias == "qv_bias":
            keys = torch.zeros_like(attention.v_bias)
            qkv_bias = torch.cat([attention.q_bias, keys, attention.v_bias])
        normed, num_heads = self.ln1(tokens), attention.num_heads
        heads = project_heads(normed, attention.qkv, num_heads, layout, first_row, qkv_bias)
        bias = None if positions.shared is None else positions.shared[:, :, first_row:]
        if attention.use_rel_pos_bias:
            own = relative_bias(attention.relative_position_bias_table, positions.steps[:, first_row:])
            bias = own if bias is None else bias + own
        dropout = attention.attn_drop.p if self.training else 0.0
        rows = attend_streams(*heads, layout, first_row, dropout, bias, attention.scale)
        return self._branch(attention.proj_drop(attention.proj(rows)), 1)

    def feed_forward(self, tokens: Float[Tensor, "batch row dim"]) -> Float[Tensor, "batch row dim"]:
        """The tokens with the update of the MLP."""
        return tokens + self._branch(self.ffn(self.ln2(tokens)), 2)

    def _branch(self, update: Tensor, number: int) -> Tensor:
        scale = getattr(self, f"gamma_{number}", None)
        return self.drop_path(update if scale is None else scale * update)


@MODELS.register_module()
class MaPeTPretrainBEiT(_OtherViT, BEiTViT):
    """MMPretrain's `BEiTViT` with the two streams; relative position biases follow each permutation.

    Args:
        **kwargs: as for `BEiTViT`; and `cutting_point`, `objective` and `with_cp` of `MaPeTPretrainViT`.

    Raises:
        ValueError: as for `MaPeTPretrainViT`, or the ViT has no position embeddings of any kind.
    """

    layer_type = BEiTLayer

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.pos_embed is None and not self._bias_owners():
            raise ValueError(
                "a ViT without position embeddings cannot know which patch to predict: set one of "
                "`use_rel_pos_bias`, `use_shared_rel_pos_bias` and `use_abs_pos_emb`"
            )

    def enter(self, tokens: Float[Tensor, "batch layout dim"]) -> Float[Tensor, "batch layout dim"]:
        """Dropout between the embedding and the first layer."""
        return self.drop_after_pos(tokens)

    def attention_positions(
        self, permutation: Int64[Tensor, "batch token"], layout: Layout
    ) -> RelativePositions:
        """The steps from each row to each key, and the bias that all layers share."""
        if not (owners := self._bias_owners()):
            return RelativePositions()
        index = owners[0].relative_position_index  # N N
        tokens = permutation[:, layout.places]
        steps = index.flatten()[tokens[:, :, None] * len(index) + tokens[:, None, : layout.num_keys]]
        if self.rel_pos_bias is None:
            return RelativePositions(steps)
        return RelativePositions(steps, relative_bias(self.rel_pos_bias.relative_position_bias_table, steps))

    def _bias_owners(self) -> list[nn.Module]:
        """The modules with a table of relative position biases."""
        modules = [self.rel_pos_bias, *(layer.attn for layer in self.layers)]
        return [one for one in modules if getattr(one, "relative_position_bias_table", None) is not None]


class EVA02Layer(TwoStreamLayer):
    """EVA-02's layer."""

    def plain_attention(
        self, tokens: Float[Tensor, "batch row dim"], patch_resolution: tuple[int, int]
    ) -> Float[Tensor, "batch row dim"]:
        """The update of whole images by attention."""
        return self.drop_path(self.attn(self.norm1(tokens), patch_resolution))

    def attention(
        self,
        tokens: Float[Tensor, "batch layout dim"],
        layout: Layout,
        first_row: int,
        positions: tuple[Tensor, Tensor],
    ) -> Float[Tensor, "batch row dim"]:
        """The update of both streams by attention."""
        attention = self.attn
        queries, keys, values = project_heads(
            self.norm1(tokens), attention.qkv, attention.num_heads, layout, first_row
        )
        queries = rotate(queries, *(x[:, :, first_row:] for x in positions)).type_as(values)
        keys = rotate(keys, *(x[:, :, : layout.num_keys] for x in positions)).type_as(values)
        dropout = attention.attn_drop.p if self.training else 0.0
        rows = attend_streams(queries, keys, values, layout, first_row, dropout, scale=attention.scale)
        return self.drop_path(attention.proj_drop(attention.proj(rows)))

    def feed_forward(self, tokens: Float[Tensor, "batch row dim"]) -> Float[Tensor, "batch row dim"]:
        """The tokens with the update of the MLP."""
        return tokens + self.drop_path(self.mlp(self.norm2(tokens)))


def rotate(
    heads: Float[Tensor, "batch head row channel"],
    cosines: Float[Tensor, "batch 1 row channel"],
    sines: Float[Tensor, "batch 1 row channel"],
) -> Float[Tensor, "batch head row channel"]:
    """Turn each pair of neighbouring channels by the angle of the row's place."""
    even, odd = heads.unflatten(-1, (-1, 2)).unbind(-1)
    return heads * cosines + torch.stack([-odd, even], dim=-1).flatten(-2) * sines


@MODELS.register_module()
class MaPeTPretrainEVA02(_OtherViT, ViTEVA02):
    """MMPretrain's `ViTEVA02` with the two streams; rotary angles follow each permutation.

    Args:
        **kwargs: as for `ViTEVA02`; and `cutting_point`, `objective` and `with_cp` of `MaPeTPretrainViT`.

    Raises:
        ValueError: as for `MaPeTPretrainViT`.
    """

    layer_type = EVA02Layer

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # Buffers of our own: `rope` keeps the angles of the last image's size.
        cosines, sines = self.rope.compute_position_embedding()
        # N d; the class token is not turned.
        self.register_buffer("cosines", F.pad(cosines, (0, 0, 1, 0), value=1.0), persistent=False)
        self.register_buffer("sines", F.pad(sines, (0, 0, 1, 0)), persistent=False)

    def attention_positions(
        self, permutation: Int64[Tensor, "batch token"], layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines `(B, 1, L, d)` of each row's angles."""
        tokens = permutation[:, layout.places]
        return self.cosines[tokens][:, None], self.sines[tokens][:, None]
