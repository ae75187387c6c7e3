"""timm's ViTs with the two streams of a pre-training."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mapet_mm.models.backbones.timm_vit import KINDS, TIMMViT
from mapet_mm.models.backbones.two_stream_vit import TwoStreamViT
from mapet_mm.models.backbones.vit import init_truncated_normal
from mapet_mm.models.utils.layout import Layout
from mapet_mm.models.utils.two_stream import TwoStreamLayer, attend_streams, project_heads_of_all
from mapet_mm.registry import MODELS

KNOWN = {*KINDS, "Block", "EvaBlock", "Attention", "EvaAttention"}


class TIMMLayer(TwoStreamLayer):
    """timm's `Block` or `EvaBlock`."""

    def plain_attention(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        update = self.attn(self.norm1(tokens), *args, **kwargs)
        return self.drop_path1(self._with_layer_scale(update, branch=1))

    def attention(self, tokens: Tensor, layout: Layout, first_row: int, positions: Tensor | None) -> Tensor:
        """The update of both streams; `positions` are sines and cosines of each row, or None."""
        attention = self.attn
        joint = self._project(self.norm1(tokens))  # B L 3D
        queries, keys, values = project_heads_of_all(joint, attention.num_heads, layout, first_row)
        queries = attention.q_norm(queries)
        keys = attention.k_norm(keys)
        if positions is not None:
            from timm.layers import apply_rot_embed_cat

            half = attention.rotate_half
            queries = apply_rot_embed_cat(queries, positions[:, :, first_row:], half=half).type_as(values)
            keys = apply_rot_embed_cat(keys, positions[:, :, : layout.num_keys], half=half).type_as(values)
        dropout = attention.attn_drop.p if self.training else 0.0
        rows = attend_streams(queries, keys, values, layout, first_row, dropout)
        rows = attention.proj_drop(attention.proj(attention.norm(rows)))
        return self.drop_path1(self._with_layer_scale(rows, branch=1))

    def feed_forward(self, tokens: Tensor) -> Tensor:
        update = self.mlp(self.norm2(tokens))
        return tokens + self.drop_path2(self._with_layer_scale(update, branch=2))

    def _project(self, normed: Tensor) -> Tensor:
        """Queries, keys and values side by side."""
        attention = self.attn
        if attention.qkv is None:
            parts = [attention.q_proj, attention.k_proj, attention.v_proj]
            return torch.cat([part(normed) for part in parts], -1)
        joint = attention.qkv(normed)
        if getattr(attention, "q_bias", None) is None:
            return joint
        return joint + torch.cat([attention.q_bias, attention.k_bias, attention.v_bias])

    def _with_layer_scale(self, update: Tensor, branch: int) -> Tensor:
        if hasattr(self, f"ls{branch}"):  # Block's, a module
            return getattr(self, f"ls{branch}")(update)
        scale = getattr(self, f"gamma_{branch}", None)  # EvaBlock's, a parameter
        return update if scale is None else scale * update


@MODELS.register_module()
class MaPeTPretrainTIMM(TwoStreamViT, TIMMViT):
    """`TIMMViT` with the two streams.

    Takes the models of timm's classes `VisionTransformer` and `Eva` (EVA-02, DINOv3, ...) whose layers are
    `Block` or `EvaBlock`. Class token and registers are always context; angles follow each permutation.

    Args:
        model_name: timm's name of the model.
        **kwargs: as for `TIMMBackbone` and of timm's model (`pretrained`, `img_size`, `reg_tokens`, ...);
            `cutting_point` and `objective` of `MaPeTPretrainViT`; and `norm_eps`, what the norms add to the
            variance if another library's weights want another value than timm's.

    Raises:
        ValueError: as for `MaPeTPretrainViT`, or a model with a forward pass that is unknown here.

    Examples:
        >>> vit = MaPeTPretrainTIMM("vit_tiny_patch16_224", img_size=32, cutting_point=2)
        >>> latents, permutation = vit(torch.randn(2, 3, 32, 32))
        >>> latents.shape
        torch.Size([2, 3, 192])
    """

    takes_any_size = False

    def __init__(self, model_name: str, **kwargs: Any) -> None:
        super().__init__(model_name, out_type="raw", **kwargs)
        vit = self.timm_model
        unknown = {
            "patch_drop_rate": not isinstance(vit.patch_drop, nn.Identity | None),
            "gate": any(layer.attn.gate is not None for layer in self.layers),
            "pos_embed": vit.pos_embed is None and getattr(vit, "rope", None) is None,
            "class_token": vit.cls_token is None,
        }
        if any(unknown.values()):
            names = ", ".join(name for name, wrong in unknown.items() if wrong)
            raise ValueError(f"pre-training has no forward pass for this setting of {names}: leave it out")
        init_truncated_normal(self.mask_token)  # timm's weights are drawn at construction as well
        for index, layer in enumerate(self.layers):
            self.layers[index] = TIMMLayer(layer)

    def _require_known(self, vit: nn.Module) -> None:
        """Raise ValueError for a model or layer whose two-stream forward is not here."""
        layers = getattr(vit, "blocks", ())
        parts = {type(vit), *map(type, layers), *(type(getattr(layer, "attn", None)) for layer in layers)}
        unknown = {part.__name__ for part in parts} - KNOWN
        if unknown:
            raise ValueError(f"timm's {', '.join(unknown)} has no two-stream forward here")

    def encode(self, images: Float[Tensor, "batch channel height width"]) -> tuple[Tensor, ...]:
        """Features of whole images, none masked: class token and patches, without the registers."""
        (tokens,) = super().encode(images)
        return (torch.cat([tokens[:, :1], tokens[:, self.num_extra_tokens :]], dim=1),)

    def embed_patches(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        vit = self.timm_model
        patches = vit.patch_embed(images).flatten(1, -2)  # B N-e D; with `dynamic_img_size` it is B h w D
        groups = [patches]
        for extra in (vit.reg_token, vit.cls_token):  # class token first, then registers
            if extra is not None:
                groups.insert(0, extra.expand(len(images), -1, -1))
        tokens = torch.cat(groups, dim=1)  # B N D
        if vit.pos_embed is None:
            return tokens, None
        # With `no_embed_class` the extra tokens have no position.
        return tokens, F.pad(vit.pos_embed, (0, 0, tokens.shape[1] - vit.pos_embed.shape[1], 0))

    def before_layers(self, tokens: Tensor) -> Tensor:
        return self.timm_model.norm_pre(self.timm_model.pos_drop(tokens))

    def attention_positions(self, permutation: Tensor, layout: Layout) -> Tensor | None:
        """Sines and cosines `(B, 1, L, 2 d)` of each row's angles; the extra tokens are not turned."""
        if getattr(self.timm_model, "rope", None) is None:
            return None
        of_patches = self.timm_model.rope.get_embed(self.patch_resolution)  # N-e 2d
        sines, cosines = of_patches.chunk(2, dim=-1)
        extra = (0, 0, self.num_extra_tokens, 0)
        angles = torch.cat([F.pad(sines, extra), F.pad(cosines, extra, value=1.0)], dim=-1)  # N 2d
        return angles[permutation[:, layout.ranks]][:, None]

    def after_layers(self, latents: Tensor) -> Tensor:
        return self.timm_model.fc_norm(self.timm_model.norm(latents))
