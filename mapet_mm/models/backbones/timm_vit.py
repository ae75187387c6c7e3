"""The method for timm's ViTs: plain ones, EVA-02, DINOv3, those with register tokens."""

from typing import Any

import torch
from jaxtyping import Float, Int64
from mmpretrain.models.backbones import TIMMBackbone
from torch import Tensor, nn
from torch.nn import functional as F

from mapet_mm.models.backbones.two_stream_vit import TwoStreamViT
from mapet_mm.models.utils.helpers import init_truncated_normal
from mapet_mm.models.utils.layout import Layout
from mapet_mm.models.utils.two_stream import TwoStreamLayer, attend_streams, project_heads
from mapet_mm.registry import MODELS

LAYERS = ("Block", "EvaBlock")
ATTENTIONS = ("Attention", "EvaAttention", "AttentionRope")


class TIMMLayer(TwoStreamLayer):
    """timm's `Block` or `EvaBlock`.

    Args:
        layer: timm's layer.
        with_cp: keep only the input for the backward pass and run the layer again there.

    Raises:
        ValueError: another layer or attention of timm, or one with an option unknown here.
    """

    def __init__(self, layer: nn.Module, with_cp: bool = False) -> None:
        attention = getattr(layer, "attn", None)
        kinds = type(layer).__name__, type(attention).__name__
        known = kinds[0] in LAYERS and kinds[1] in ATTENTIONS
        if not known or attention.gate is not None or getattr(attention, "num_kv_groups", 1) > 1:
            raise ValueError(f"timm's layer {' with '.join(kinds)} has no two-stream forward here")
        super().__init__(layer, with_cp)

    def plain_attention(
        self, tokens: Float[Tensor, "batch row dim"], *args: Any, **kwargs: Any
    ) -> Float[Tensor, "batch row dim"]:
        """The update of whole images by attention."""
        return self.drop_path1(self._scaled(self.attn(self.norm1(tokens), *args, **kwargs), 1))

    def attention(
        self,
        tokens: Float[Tensor, "batch layout dim"],
        layout: Layout,
        first_row: int,
        positions: Float[Tensor, "batch 1 layout two_channels"] | None,
    ) -> Float[Tensor, "batch row dim"]:
        """The update of both streams; `positions` are sines and cosines of each row's place, or None."""
        attention = self.attn
        normed, num_heads = self.norm1(tokens), attention.num_heads
        queries, keys, values = project_heads(normed, self._queries_keys_values, num_heads, layout, first_row)
        queries, keys = attention.q_norm(queries), attention.k_norm(keys)
        if positions is not None:
            from timm.layers import apply_rot_embed_cat

            half = attention.rotate_half
            queries = apply_rot_embed_cat(queries, positions[:, :, first_row:], half=half).type_as(values)
            keys = apply_rot_embed_cat(keys, positions[:, :, : layout.num_keys], half=half).type_as(values)
        dropout = attention.attn_drop.p if self.training else 0.0
        rows = attend_streams(queries, keys, values, layout, first_row, dropout, scale=attention.scale)
        rows = attention.proj_drop(attention.proj(attention.norm(rows)))
        return self.drop_path1(self._scaled(rows, 1))

    def feed_forward(self, tokens: Float[Tensor, "batch row dim"]) -> Float[Tensor, "batch row dim"]:
        """The tokens with the update of the MLP."""
        return tokens + self.drop_path2(self._scaled(self.mlp(self.norm2(tokens)), 2))

    def _queries_keys_values(self, normed: Tensor) -> Float[Tensor, "batch layout three_dims"]:
        attention = self.attn
        if attention.qkv is None:
            return torch.cat(
                [attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed)], -1
            )
        joint = attention.qkv(normed)
        if getattr(attention, "q_bias", None) is None:
            return joint
        return joint + torch.cat([attention.q_bias, attention.k_bias, attention.v_bias])

    def _scaled(self, update: Tensor, number: int) -> Tensor:
        if hasattr(self, f"ls{number}"):  # Block's, a module
            return getattr(self, f"ls{number}")(update)
        scale = getattr(self, f"gamma_{number}", None)  # EvaBlock's, a parameter
        return update if scale is None else scale * update


class TIMMViT(TIMMBackbone):
    """MMPretrain's `TIMMBackbone` of a ViT, with the attributes of MMPretrain's own ViTs."""

    def __init__(self, model_name: str, **kwargs: Any) -> None:
        super().__init__(model_name, **kwargs)
        if (kind := type(self.timm_model).__name__) not in ("Eva", "VisionTransformer"):
            raise ValueError(f"timm's {kind} has no two-stream forward here: take a VisionTransformer or Eva")

    @property
    def layers(self) -> nn.ModuleList | nn.Sequential:
        """The layers."""
        return self.timm_model.blocks

    @property
    def embed_dims(self) -> int:
        """Width `D` of the tokens."""
        return self.timm_model.embed_dim

    @property
    def img_size(self) -> tuple[int, int]:
        """Height and width of the images."""
        return self.timm_model.patch_embed.img_size

    @property
    def patch_resolution(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.timm_model.patch_embed.grid_size

    @property
    def num_extra_tokens(self) -> int:
        """Class token and registers."""
        return self.timm_model.num_prefix_tokens


@MODELS.register_module()
class MaPeTPretrainTIMM(TwoStreamViT, TIMMViT):
    """MMPretrain's `TIMMBackbone` of a timm ViT, with the two streams.

    Takes the models of timm's classes `VisionTransformer` and `Eva` (EVA-02, DINOv3, ...) whose layers are
    `Block` or `EvaBlock`. Class token and registers are always context; angles follow each permutation.

    Args:
        model_name: timm's name of the model.
        with_cp: keep only the layers' inputs for the backward pass and run each layer again there.
        **kwargs: as for `TIMMBackbone` and of timm's model (`pretrained`, `img_size`, `reg_tokens`, ...);
            and `cutting_point` and `objective` of `MaPeTPretrainViT`.

    Raises:
        ValueError: as for `MaPeTPretrainViT`, or a model with a forward pass that is unknown here.
    """

    def __init__(self, model_name: str, *, with_cp: bool = False, **kwargs: Any) -> None:
        super().__init__(model_name, **kwargs)
        vit = self.timm_model
        unknown = {
            "patch_drop_rate": not isinstance(vit.patch_drop, nn.Identity | None),
            "rope_mixed": getattr(vit, "rope_mixed", False),
            "pos_embed": vit.pos_embed is None and getattr(vit, "rope", None) is None,
            "class_token": vit.cls_token is None,
            "final_norm": isinstance(vit.norm, nn.Identity) and isinstance(vit.fc_norm, nn.Identity),
        }
        if any(unknown.values()):
            names = ", ".join(name for name, wrong in unknown.items() if wrong)
            raise ValueError(f"pre-training has no forward pass for this setting of {names}: leave it out")
        init_truncated_normal(self.mask_token)  # timm's weights are drawn at construction as well
        for number, layer in enumerate(self.layers):
            self.layers[number] = TIMMLayer(layer, with_cp)

    def encode(self, images: Float[Tensor, "batch channel height width"]) -> tuple[Tensor, ...]:
        """Features of whole images, none masked: class token and patches, without the registers."""
        (tokens,) = super().encode(images)
        return (torch.cat([tokens[:, :1], tokens[:, self.num_extra_tokens :]], dim=1),)

    def stem(
        self, images: Float[Tensor, "batch channel height width"]
    ) -> tuple[Float[Tensor, "batch token dim"], Float[Tensor, "one token dim"] | None]:
        """Extra tokens and patches `(B, N, D)`, and the position embeddings `(1, N, D)` to add to them."""
        vit = self.timm_model
        patches = vit.patch_embed(images)
        patches = patches.flatten(1, -2)  # B N-e D; with `dynamic_img_size` it comes as B h w D
        extra = [
            one.expand(images.shape[0], -1, -1) for one in (vit.cls_token, vit.reg_token) if one is not None
        ]
        tokens = torch.cat([*extra, patches], dim=1)
        if vit.pos_embed is None:
            return tokens, None
        # With `no_embed_class` the extra tokens have no position.
        return tokens, F.pad(vit.pos_embed, (0, 0, tokens.shape[1] - vit.pos_embed.shape[1], 0))

    def enter(self, tokens: Float[Tensor, "batch layout dim"]) -> Float[Tensor, "batch layout dim"]:
        """Dropout and norm between the embedding and the first layer."""
        return self.timm_model.norm_pre(self.timm_model.pos_drop(tokens))

    def attention_positions(self, permutation: Int64[Tensor, "batch token"], layout: Layout) -> Tensor | None:
        """Sines and cosines `(B, 1, L, 2 d)` of each row's angles; the extra tokens are not turned."""
        if getattr(self.timm_model, "rope", None) is None:
            return None
        of_patches = self.timm_model.rope.get_embed(self.patch_resolution)  # N-e 2d
        sines, cosines = of_patches.chunk(2, dim=-1)
        extra = (0, 0, self.num_extra_tokens, 0)
        angles = torch.cat([F.pad(sines, extra), F.pad(cosines, extra, value=1.0)], dim=-1)  # N 2d
        return angles[permutation[:, layout.places]][:, None]

    def leave(self, latents: Float[Tensor, "batch row dim"]) -> Float[Tensor, "batch row dim"]:
        """The final norm, one of timm's two."""
        return self.timm_model.fc_norm(self.timm_model.norm(latents))
