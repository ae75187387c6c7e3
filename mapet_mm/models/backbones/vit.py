"""The Vision Transformers: `MaPeTViT` for downstream tasks, `MaPeTPretrainViT` with the two streams.

Both are MMPretrain's `VisionTransformer` and share its parameter names, so weights go back and forth.
"""

from collections.abc import Iterable, Sequence
from typing import SupportsIndex

import torch
from jaxtyping import Float
from mmcv.cnn.bricks import DropPath
from mmcv.cnn.bricks.scale import LayerScale
from mmcv.cnn.bricks.transformer import FFN
from mmengine.model import BaseModule
from mmengine.model.weight_init import trunc_normal_
from mmengine.utils import to_2tuple
from mmpretrain.models import utils as mmpretrain_parts
from mmpretrain.models.backbones import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from mapet_mm.models.backbones.checkpoint_hooks import adapt_checkpoint, record_grid
from mapet_mm.models.backbones.two_stream_vit import TwoStreamViT
from mapet_mm.models.utils.feature_maps import cut_padding
from mapet_mm.models.utils.layout import Layout
from mapet_mm.models.utils.two_stream import (
    TwoStreamLayer,
    attend_streams,
    is_plain_linear,
    project_heads,
)
from mapet_mm.registry import MODELS

WITH_CLASS_TOKEN = "featmap_and_cls_token"
MAPS = ("featmap", WITH_CLASS_TOKEN)
LAYER_SCALE_TYPES = (LayerScale, mmpretrain_parts.LayerScale)
# The authors' initial weights: a normal distribution of this standard deviation.
STD = 0.02
# They truncate at +-2: no truncation at this standard deviation. Sampling by the inverse error function gives
# about one infinity in 2^24 draws, clamped to the bound, so the bound has to be harmless.
BOUND = 10 * STD


def init_truncated_normal(tensor: Tensor) -> None:
    """Draw linear weights, position embeddings or mask tokens as the authors do, in place."""
    trunc_normal_(tensor, std=STD, a=-BOUND, b=BOUND)


class ViTLayer(TwoStreamLayer):
    """MMPretrain's Transformer layer.

    The two streams call neither `attn` nor a plain `attn.qkv` as a whole, and LayerScale and stochastic depth
    after a plain linear layer are computed with it: hooks on these do not run.
    """

    def plain(self, tokens: Tensor) -> Tensor:
        """MMPretrain's own layer."""
        tokens = tokens + self.attn(self.ln1(tokens))
        return self.ffn(self.ln2(tokens), identity=tokens)

    def attention(self, tokens: Tensor, layout: Layout, first_row: int, positions: None) -> Tensor:
        """The update of both streams by attention."""
        attention = self.attn
        heads = project_heads(self.ln1(tokens), attention.qkv, attention.num_heads, layout, first_row)
        dropout = attention.attn_drop if self.training else 0.0
        rows = attend_streams(*heads, layout, first_row, dropout)  # B R D
        return end_of_branch(attention.proj, attention.gamma1, attention.proj_drop, attention.out_drop, rows)

    def feed_forward(self, tokens: Tensor) -> Tensor:
        if type(self.ffn) is not FFN or len(self.ffn.layers) != 3:  # `layer_cfgs` asked for another MLP
            return self.ffn(self.ln2(tokens), identity=tokens)
        hidden_layer, last_layer, dropout = self.ffn.layers
        hidden = hidden_layer(self.ln2(tokens))  # B R 4D
        return tokens + end_of_branch(last_layer, self.ffn.gamma2, dropout, self.ffn.dropout_layer, hidden)


def end_of_branch(
    linear: nn.Module,
    scale: nn.Module,
    dropout: nn.Module,
    drop_path: nn.Module,
    rows: Float[Tensor, "batch row hidden"],
) -> Float[Tensor, "batch row dim"]:
    """The update of a residual branch: its last linear layer, LayerScale, dropout and stochastic depth.

    LayerScale is multiplied into the weights, a tenth less memory for a step. So is the factor of stochastic
    depth; all that is left of it is one multiplication of the update, by 1 or 0 for each image.
    """
    if not is_plain_linear(linear) or type(scale) not in LAYER_SCALE_TYPES:
        return drop_path(dropout(scale(linear(rows))))
    factor = scale.weight
    drops_images = type(drop_path) is DropPath and drop_path.training and drop_path.drop_prob > 0
    if drops_images:
        factor = factor / (1 - drop_path.drop_prob)
    bias = None if linear.bias is None else linear.bias * factor
    update = dropout(F.linear(rows, linear.weight * factor[:, None], bias))
    if not drops_images:
        return drop_path(update)
    draws = torch.rand(len(update), 1, 1, device=update.device)  # float32 also where the update is not
    is_kept = (1 - drop_path.drop_prob + draws).floor()
    return update * is_kept.to(update.dtype)


@MODELS.register_module()
class MaPeTViT(VisionTransformer):
    """Vision Transformer with the method's defaults, for fine-tuning and every downstream task.

    Loads pre-training checkpoints by `init_cfg` or `load_from`: MaPeT's, and MMPretrain's BEiT's and
    CAE's with absolute positions. The mask token is dropped, positions are resized to `img_size`,
    and where the weights have no LayerScale (MAE's, DeiT's), it becomes one, which keeps the outputs. Where
    only the weights have one, it is multiplied into the layer before it.

    Its initial weights are the authors'. Checkpoints without any of its layers or with an unknown patch grid
    are refused. Images may have any size: their positions are resized, and of a side that is no multiple of
    the patch a map leaves out what the padding answered.

    Args:
        arch: 'deit-tiny' | 'deit-small' | 'deit-base' | 'large' | a dict, as in MMPretrain.
        img_size: side, or (height, width), of the images in pixels.
        patch_size: side, or (height, width), of a patch in pixels.
        out_type: 'cls_token' | 'avg_featmap' (mean of the patch tokens, then LayerNorm: fine-tuning) |
            'featmap' `(B, D, h, w)` (segmentation) | 'raw' `(B, N, D)` | 'featmap_and_cls_token' (a pair of
            both for each layer, as MMSegmentation's DPT head takes it).
        out_indices: the layers whose output is returned, in ascending order; negative from the end.
        layer_scale_init_value: initial LayerScale (paper, hyper-parameters for pre-training).
        with_cp: activation checkpointing: less memory for a third more arithmetic.
        pretrained_grid: the (rows, columns) of patches that a loaded checkpoint's position embeddings cover,
            if they are not a square and the checkpoint, which may be another library's, does not say.
        **kwargs: as for MMPretrain's `VisionTransformer`: `drop_path_rate`, `final_norm`,
            `frozen_stages`, `init_cfg`, ...

    Examples:
        >>> vit = MaPeTViT("deit-tiny", img_size=32, out_type="featmap")
        >>> (features,) = vit(torch.randn(2, 3, 32, 32))
        >>> features.shape
        torch.Size([2, 192, 2, 2])
    """

    OUT_TYPES = VisionTransformer.OUT_TYPES | {WITH_CLASS_TOKEN}

    def __init__(
        self,
        arch: str | dict = "deit-base",
        img_size: SupportsIndex | Iterable[SupportsIndex] = 224,
        patch_size: SupportsIndex | Iterable[SupportsIndex] = 16,
        out_type: str = "cls_token",
        out_indices: int | Sequence[int] = -1,
        layer_scale_init_value: float = 0.1,
        with_cp: bool = False,
        pretrained_grid: Iterable[SupportsIndex] | None = None,
        **kwargs,
    ) -> None:
        super().__init__(
            arch,
            img_size=tuple(to_2tuple(img_size)),
            patch_size=tuple(to_2tuple(patch_size)),
            out_type=out_type,
            # A list of our own: MMPretrain resolves negative ones in place.
            out_indices=list(out_indices) if isinstance(out_indices, Sequence) else int(out_indices),
            layer_scale_init_value=layer_scale_init_value,
            **kwargs,
        )
        self.pretrained_grid = None if pretrained_grid is None else tuple(pretrained_grid)
        self.register_state_dict_post_hook(record_grid)
        for index, layer in enumerate(self.layers):
            self.layers[index] = ViTLayer(layer, with_cp)

    def init_weights(self) -> None:
        """Initialise as the authors do, then as `init_cfg` says; only once, as MMEngine's modules do."""
        if not self.is_init:
            self.draw_weights()
        BaseModule.init_weights(self)  # MMPretrain's draws the positions over an `init_cfg`

    def draw_weights(self) -> None:
        """The authors' initialisation; the patch convolution keeps the framework's default."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                init_truncated_normal(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        init_truncated_normal(self.pos_embed)
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token, std=1e-6)

    def train(self, mode: bool = True) -> "MaPeTViT":
        """Set the mode; frozen stages, or a wholly frozen backbone, stay in evaluation mode.

        MMPretrain sets the stages' mode only once, at construction, so a later `train()` would thaw it.
        """
        super().train(mode and self.frozen_stages < self.num_layers)
        if self.frozen_stages > 0:
            for frozen in (self.drop_after_pos, self.patch_embed, *self.layers[: self.frozen_stages]):
                frozen.eval()
        return self

    def _prepare_pos_embed(self, state_dict: dict, prefix: str, local_metadata: dict, *_) -> None:
        """MMPretrain's hook on loading; its own takes every grid for a square."""
        adapt_checkpoint(self, state_dict, prefix, local_metadata)

    @property
    def patch_stride(self) -> tuple[int, int]:
        """Rows and columns of pixels from one patch to the next."""
        return self.patch_embed.projection.stride

    def forward(self, images: Tensor) -> tuple[Tensor, ...] | tuple[tuple[Tensor, Tensor], ...]:
        """The output of each layer of `out_indices`, as `out_type` says; maps cover the image exactly."""
        outputs = super().forward(images)
        if self.out_type not in MAPS:
            return outputs
        size = images.shape[-2:]
        stride = self.patch_stride
        if self.out_type == "featmap":
            return tuple(cut_padding(feature_map, size, stride) for feature_map in outputs)
        return tuple((cut_padding(feature_map, size, stride), token) for feature_map, token in outputs)

    def _format_output(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor | tuple[Tensor, Tensor]:
        """One layer's output, as `out_type` says."""
        if self.out_type not in MAPS:
            return super()._format_output(tokens, grid)
        patches = tokens[:, self.num_extra_tokens :].unflatten(1, tuple(grid))  # B h w D
        # Not MMPretrain's permuted view: some decoders take views of it themselves.
        feature_map = patches.permute(0, 3, 1, 2).contiguous()
        if self.out_type == "featmap":
            return feature_map
        return feature_map, tokens[:, 0]


@MODELS.register_module()
class MaPeTPretrainViT(TwoStreamViT, MaPeTViT):
    """Two-stream Vision Transformer that embeds targets for token prediction (paper, Section 4.1).

    Arguments are as for `MaPeTViT` and `TwoStreamViT`; the images must have the size `img_size`.

    Args:
        cutting_point: number of tokens that are context, the class token among them; the paper's: 50 for
            ViT-T and S, 60 for B.
        recompute: has no effect; configs of earlier trainings have it. For less memory take `with_cp`.

    Examples:
        >>> vit = MaPeTPretrainViT("deit-tiny", img_size=32, cutting_point=2)  # of 5 tokens
        >>> latents, permutation = vit(torch.randn(2, 3, 32, 32))
        >>> latents.shape  # 3 targets
        torch.Size([2, 3, 192])
    """

    def __init__(
        self,
        arch: str | dict = "deit-base",
        img_size: SupportsIndex | Iterable[SupportsIndex] = 224,
        patch_size: SupportsIndex | Iterable[SupportsIndex] = 16,
        cutting_point: SupportsIndex = 60,
        objective: str = "mapet",
        recompute: bool = False,
        **kwargs,
    ) -> None:
        kwargs |= dict(cutting_point=cutting_point, objective=objective)
        super().__init__(arch, img_size, patch_size, out_type="raw", **kwargs)

    def draw_weights(self) -> None:
        super().draw_weights()
        init_truncated_normal(self.mask_token)
