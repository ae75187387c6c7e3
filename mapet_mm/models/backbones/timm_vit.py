"""The method for timm's ViTs: plain ones, EVA-02, those with register tokens."""

from typing import Any, SupportsIndex

import torch
from jaxtyping import Float, Int64
from mmpretrain.models.backbones import TIMMBackbone
from torch import Tensor, nn
from torch.nn import functional as F

from mapet_mm.models.backbones.two_stream_vit import TwoStreamViT
from mapet_mm.models.utils.encoder_layer import take_over
from mapet_mm.models.utils.init import init_truncated_normal
from mapet_mm.models.utils.layout import Layout
from mapet_mm.registry import MODELS


class TIMMViT(TIMMBackbone):
    """MMPretrain's `TIMMBackbone` of a ViT, with the attributes of MMPretrain's own ViTs.

    Raises:
        ValueError: a model, or a layer or an option of it, whose forward pass is not known here.
    """

    def __init__(self, model_name: str, **kwargs: Any) -> None:
        super().__init__(model_name, **kwargs)
        check_model(self.timm_model)

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


def check_model(model: nn.Module) -> None:
    """Raise ValueError unless the two-stream forward does all that the model does."""
    from timm.models import Eva, VisionTransformer

    from mapet_mm.models.backbones.timm_layers import ATTENTIONS, LAYERS

    if type(model) not in (Eva, VisionTransformer):
        raise ValueError(
            f"timm's {type(model).__name__} has no two-stream forward here: take a model of its classes "
            "VisionTransformer or Eva, without `features_only`"
        )
    for layer in model.blocks:
        known = type(layer) in LAYERS and type(layer.attn) in ATTENTIONS
        if not known or layer.attn.gate is not None:
            kinds = f"{type(layer).__name__} with {type(getattr(layer, 'attn', None)).__name__}"
            raise ValueError(
                f"timm's layer {kinds} has no two-stream forward here: take a model of "
                f"{' or '.join(kind.__name__ for kind in LAYERS)} without gates, or add it to "
                "mapet_mm/models/backbones/timm_layers.py"
            )
    if isinstance(model.norm, nn.Identity) and isinstance(model.fc_norm, nn.Identity):
        raise ValueError("final_norm=False: pre-training needs the final norm before the head; leave it out")
    if model.cls_token is None:
        raise ValueError("class_token=False: pre-training needs the class token, which is always context")
    if not isinstance(model.patch_drop, nn.Identity | None):
        raise ValueError("patch_drop_rate drops patches, but every one is context or target: leave it out")
    if getattr(model, "rope_mixed", False):
        raise ValueError("rope_mixed: rotary angles that are learned for each layer are not known here")
    if model.pos_embed is None and getattr(model, "rope", None) is None:
        raise ValueError("a ViT without position embeddings cannot know which patch to predict")


@MODELS.register_module()
class MaPeTPretrainTIMM(TwoStreamViT, TIMMViT):
    """MMPretrain's `TIMMBackbone` of a timm ViT, with the two streams.

    Takes the models of timm's classes `VisionTransformer` and `Eva` (EVA-02, DINOv3, ...) whose layers are
    `Block` or `EvaBlock`. Class token and registers are always context; rotary angles follow each
    permutation.

    Args:
        model_name: timm's name of the model.
        cutting_point: number of tokens of the permuted sequence that are context, including class token and
            registers.
        objective: 'mapet' | 'pim' | 'mim'.
        with_cp: keep only the layers' inputs for the backward pass and run each layer again there.
        **kwargs: those of `TIMMBackbone`: `pretrained`, and the arguments of timm's model, such as
            `img_size`, `embed_dim`, `depth` and `reg_tokens`.

    Raises:
        ValueError: as for `MaPeTPretrainViT`, or a model whose forward pass is not known here.
    """

    def __init__(
        self,
        model_name: str,
        *,
        cutting_point: SupportsIndex = 60,
        objective: str = "mapet",
        with_cp: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(model_name, cutting_point=cutting_point, objective=objective, **kwargs)
        from mapet_mm.models.backbones.timm_layers import LAYERS  # needs timm

        init_truncated_normal(self.mask_token)  # timm's weights are drawn at construction as well
        for layer in self.layers:
            take_over(layer, LAYERS[type(layer)], with_cp)

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
        """What comes between the embedding and the first layer."""
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
        """What comes after the last layer: timm's final norm is one of the two."""
        return self.timm_model.fc_norm(self.timm_model.norm(latents))
