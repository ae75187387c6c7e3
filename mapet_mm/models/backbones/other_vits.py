"""The method for MMPretrain's other ViTs: BEiT with relative positions, EVA-02 with rotary ones.

Their parameters keep the library's names, so pre-trained weights load into the library's own class.
"""

from typing import Any

import torch
from mmpretrain.models.backbones import BEiTViT, ViTEVA02
from torch import Tensor, nn
from torch.nn import functional as F

from mapet_mm.models.backbones.checkpoint_hooks import fill_layer_scales
from mapet_mm.models.backbones.initialisation import init_truncated_normal
from mapet_mm.models.backbones.two_stream_vit import TwoStreamViT
from mapet_mm.models.utils.layout import Layout
from mapet_mm.models.utils.two_stream import TwoStreamLayer, attend_streams, project_heads
from mapet_mm.registry import MODELS


class _OtherViT(TwoStreamViT):
    """The part that MMPretrain's other ViTs share: layers of our type, made of the library's."""

    layer_type: type[TwoStreamLayer]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(out_type="raw", final_norm=True, **kwargs)
        for index, layer in enumerate(self.layers):
            self.layers[index] = self.layer_type(layer)
        self.register_load_state_dict_pre_hook(fill_layer_scales)

    def init_weights(self) -> None:
        """Initialise as MMPretrain does; the mask token as the authors do."""
        if not self.is_init:
            init_truncated_normal(self.mask_token)
        super().init_weights()


class BEiTLayer(TwoStreamLayer):
    """BEiT's layer."""

    def init_weights(self) -> None:
        """Initialise as MMPretrain's layer does: the MLP's matrices by Xavier."""
        super().init_weights()
        for module in self.ffn.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.normal_(module.bias, std=1e-6)

    def plain_attention(self, tokens: Tensor, rel_pos_bias: None = None) -> Tensor:
        return self._branch(self.attn(self.ln1(tokens), rel_pos_bias), 1)

    def attention(self, tokens: Tensor, layout: Layout, groups: str, positions: Tensor | None) -> Tensor:
        """The update of both streams; `positions` are rows of the table of biases, None without tables."""
        attention = self.attn
        # BEiT keeps the bias of queries and values apart, and has none for the keys.
        qkv_bias = None
        if attention.bias == "qv_bias":
            key_bias = torch.zeros_like(attention.v_bias)
            qkv_bias = torch.cat([attention.q_bias, key_bias, attention.v_bias])
        normed = self.ln1(tokens)
        heads = project_heads(normed, attention.qkv, attention.num_heads, layout, groups, qkv_bias)

        # Relative position biases, of each row and key by the patches that they stand for.
        bias = None
        if attention.use_rel_pos_bias:
            bias = F.embedding(layout.take(positions, groups), attention.relative_position_bias_table)
            bias = bias.permute(0, 3, 1, 2).contiguous()  # B R K H -> B H R K
        dropout = attention.attn_drop.p if self.training else 0.0
        rows = attend_streams(*heads, layout, groups, dropout, bias, attention.scale)
        return self._branch(attention.proj_drop(attention.proj(rows)), 1)

    def feed_forward(self, tokens: Tensor) -> Tensor:
        return tokens + self._branch(self.ffn(self.ln2(tokens)), 2)

    def _branch(self, update: Tensor, branch: int) -> Tensor:
        """LayerScale, if the layer has any, and stochastic depth of the first or second branch."""
        scale = getattr(self, f"gamma_{branch}", None)
        if scale is not None:
            update = scale * update
        return self.drop_path(update)


@MODELS.register_module()
class MaPeTPretrainBEiT(_OtherViT, BEiTViT):
    """MMPretrain's `BEiTViT` with the two streams; relative position biases follow each permutation.

    Args:
        **kwargs: as for `BEiTViT`, without a bias shared by all layers; and `cutting_point` and `objective`
            of `MaPeTPretrainViT`.

    Raises:
        ValueError: as for `MaPeTPretrainViT`, or no position embeddings but shared ones.

    Examples:
        >>> vit = MaPeTPretrainBEiT(arch="base", img_size=32, cutting_point=2)
        >>> latents, permutation = vit(torch.randn(2, 3, 32, 32))
        >>> latents.shape
        torch.Size([2, 3, 768])
    """

    layer_type = BEiTLayer

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.biased = [layer.attn for layer in self.layers if layer.attn.use_rel_pos_bias]
        if self.rel_pos_bias is not None or (self.pos_embed is None and not self.biased):
            raise ValueError(
                "the position embeddings of BEiT are `use_rel_pos_bias`, `use_abs_pos_emb` or both here: no "
                "others let its queries know which patch to predict"
            )

    def before_layers(self, tokens: Tensor) -> Tensor:
        return self.drop_after_pos(tokens)

    def attention_positions(self, permutation: Tensor, layout: Layout) -> Tensor | None:
        """For each row and key, the row of their bias in the layers' tables; None without tables."""
        if not self.biased:
            return None
        index = self.biased[0].relative_position_index  # N N
        tokens = permutation[:, layout.ranks]
        return index.flatten()[tokens[:, :, None] * len(index) + tokens[:, None, : layout.num_keys]]


class EVA02Layer(TwoStreamLayer):
    """EVA-02's layer."""

    def plain_attention(self, tokens: Tensor, patch_resolution: tuple[int, int]) -> Tensor:
        return self.drop_path(self.attn(self.norm1(tokens), patch_resolution))

    def attention(self, tokens: Tensor, layout: Layout, groups: str, positions: tuple) -> Tensor:
        """The update of both streams; `positions` are cosines and sines `(B, 1, L, d)` of each row."""
        attention = self.attn
        normed = self.norm1(tokens)
        queries, keys, values = project_heads(normed, attention.qkv, attention.num_heads, layout, groups)
        # Turn queries and keys by the angles of the patches that they stand for.
        cosines, sines = positions
        num_keys = layout.num_keys
        query_cosines = layout.take(cosines, groups, dim=2)
        query_sines = layout.take(sines, groups, dim=2)
        queries = rotate(queries, query_cosines, query_sines).type_as(values)
        keys = rotate(keys, cosines[:, :, :num_keys], sines[:, :, :num_keys]).type_as(values)
        dropout = attention.attn_drop.p if self.training else 0.0
        rows = attend_streams(queries, keys, values, layout, groups, dropout, scale=attention.scale)
        return self.drop_path(attention.proj_drop(attention.proj(rows)))

    def feed_forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.drop_path(self.mlp(self.norm2(tokens)))


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn each pair of neighbouring channels `(B, H, R, d)` by the angle of the row's position."""
    even, odd = heads.unflatten(-1, (-1, 2)).unbind(-1)
    return heads * cosines + torch.stack([-odd, even], dim=-1).flatten(-2) * sines


@MODELS.register_module()
class MaPeTPretrainEVA02(_OtherViT, ViTEVA02):
    """MMPretrain's `ViTEVA02` with the two streams; rotary angles follow each permutation.

    Args:
        **kwargs: as for `ViTEVA02`; and `cutting_point` and `objective` of `MaPeTPretrainViT`.

    Raises:
        ValueError: as for `MaPeTPretrainViT`.

    Examples:
        >>> vit = MaPeTPretrainEVA02(arch="tiny", img_size=28, cutting_point=2)
        >>> latents, permutation = vit(torch.randn(2, 3, 28, 28))
        >>> latents.shape
        torch.Size([2, 3, 192])
    """

    layer_type = EVA02Layer

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # Buffers of our own: `rope` keeps the angles of the last image's size.
        cosines, sines = self.rope.compute_position_embedding()
        # N d; the class token is not turned.
        self.register_buffer("cosines", F.pad(cosines, (0, 0, 1, 0), value=1.0), persistent=False)
        self.register_buffer("sines", F.pad(sines, (0, 0, 1, 0)), persistent=False)

    def attention_positions(self, permutation: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Cosines and sines `(B, 1, L, d)` of each row's angles."""
        tokens = permutation[:, layout.ranks]
        return self.cosines[tokens][:, None], self.sines[tokens][:, None]
