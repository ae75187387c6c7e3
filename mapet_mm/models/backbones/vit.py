"""The Vision Transformers: `MaPeTViT` for downstream tasks, `MaPeTPretrainViT` with the two streams.

Both are MMPretrain's `VisionTransformer` and share its parameter names, so weights go back and forth.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

from mmengine.logging import print_log
from mmpretrain.models.backbones import VisionTransformer
from torch import Tensor, nn

from mapet_mm.models.backbones.two_stream_vit import TwoStreamViT, check_trainable
from mapet_mm.models.utils.beit_names import beit_to_vit
from mapet_mm.models.utils.encoder_layer import EncoderLayer, take_over
from mapet_mm.models.utils.init import init_truncated_normal
from mapet_mm.models.utils.layer_scale import fill_layer_scales, fold_layer_scales
from mapet_mm.models.utils.position_embedding import METADATA_KEY, fit_positions, grid_of_init, record_grid
from mapet_mm.models.utils.two_stream import TwoStreamLayer
from mapet_mm.registry import MODELS
from mapet_mm.utils.config import pair

WITH_CLASS_TOKEN = "featmap_and_cls_token"


@MODELS.register_module()
class MaPeTViT(VisionTransformer):
    """Vision Transformer with the method's defaults, for fine-tuning and every downstream task.

    Loads pre-training checkpoints by `init_cfg` or `load_from`: MaPeT's, and those of MMPretrain's BEiT and
    CAE with absolute positions. The mask token is dropped, the position embeddings are resized to `img_size`,
    and where the weights have no LayerScale (MAE's, DeiT's), it becomes one, which keeps the outputs. Where
    only the weights have one, it is multiplied into the layer before it.

    MMPretrain's tests of its class pass with this one. It differs in its defaults and its initial weights
    (the authors'), refuses output layers that would not be returned, and asks for a checkpoint's grid where
    MMPretrain assumes a square.

    Args:
        arch: 'deit-tiny' | 'deit-small' | 'deit-base' | 'large' | a dict, as in MMPretrain.
        img_size: side, or (height, width), of the images in pixels.
        patch_size: side, or (height, width), of a patch in pixels.
        out_type: 'cls_token' | 'avg_featmap' (mean of the patch tokens, then LayerNorm: fine-tuning) |
            'featmap' `(B, D, h, w)` (segmentation) | 'raw' `(B, N, D)` | 'featmap_and_cls_token' (a pair of
            both for each layer, as MMSegmentation's DPT head takes it).
        out_indices: the layers whose output is returned, as a tuple; ascending, negative from the end.
        layer_scale_init_value: initial LayerScale (paper, hyper-parameters for pre-training).
        with_cp: keep only the layers' inputs for the backward pass and run each layer again there: less
            memory for a third more arithmetic (activation checkpointing).
        pretrained_grid: the (rows, columns) of patches that a loaded checkpoint's position embeddings cover,
            if it does not record them (those saved here do) and they are not a square.
        **kwargs: those of MMPretrain's `VisionTransformer`: `drop_path_rate`, `final_norm`,
            `frozen_stages`, `init_cfg`, ...

    Raises:
        ValueError: a size that is not one or two whole numbers, output layers that do not exist, are repeated
            or are not ascending, more frozen stages than layers, or an output with the class token although
            the backbone has none.
    """

    layer_type = EncoderLayer
    OUT_TYPES = VisionTransformer.OUT_TYPES | {WITH_CLASS_TOKEN}

    def __init__(
        self,
        arch: str | dict = "deit-base",
        img_size: SupportsIndex | Iterable[SupportsIndex] = 224,
        patch_size: SupportsIndex | Iterable[SupportsIndex] = 16,
        out_type: str = "cls_token",
        out_indices: SupportsIndex | Sequence[SupportsIndex] = -1,
        layer_scale_init_value: float = 0.1,
        with_cp: bool = False,
        pretrained_grid: Iterable[SupportsIndex] | None = None,
        **kwargs,
    ) -> None:
        super().__init__(
            arch,
            img_size=pair("img_size", img_size),
            patch_size=pair("patch_size", patch_size),
            out_type=out_type,
            out_indices=_own_list(out_indices),
            layer_scale_init_value=layer_scale_init_value,
            **kwargs,
        )
        self._check_out_indices(out_indices)
        if out_type == WITH_CLASS_TOKEN and not self.num_extra_tokens:
            raise ValueError(f"out_type='{out_type}' needs the class token: leave `with_cls_token` out")
        self.pretrained_grid = None if pretrained_grid is None else pair("pretrained_grid", pretrained_grid)
        for layer in self.layers:
            take_over(layer, self.layer_type, with_cp)
        self._grid_of_init: tuple[int, int] | None = None
        self.register_load_state_dict_pre_hook(_adapt_checkpoint)
        self.register_load_state_dict_pre_hook(fill_layer_scales)
        self.register_load_state_dict_pre_hook(fold_layer_scales)
        self.register_state_dict_post_hook(record_grid)

    def init_weights(self) -> None:
        """Initialise as the authors do, then as `init_cfg` says; only once, as MMEngine's modules do."""
        if not self.is_init:
            self.draw_weights()
            self._grid_of_init = grid_of_init(self.init_cfg)
        super(VisionTransformer, self).init_weights()  # MMPretrain's draws the positions over an `init_cfg`
        self._grid_of_init = None  # of those weights only

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

        MMPretrain freezes the stages' mode only once, at construction, so a later `train()` would thaw it.
        """
        super().train(mode and self.frozen_stages < self.num_layers)
        if self.frozen_stages > 0:
            self._freeze_stages()
        return self

    def _freeze_stages(self) -> None:
        if self.frozen_stages > self.num_layers:
            raise ValueError(f"frozen_stages={self.frozen_stages}: there are {self.num_layers} layers")
        super()._freeze_stages()

    def _prepare_pos_embed(self, state_dict: dict, prefix: str, local_metadata: dict, *_) -> None:
        """MMPretrain's hook on loading, the first to run; its own takes every source for a square."""
        _check_checkpoint(self, state_dict, prefix)
        fit_positions(self, state_dict, prefix, {METADATA_KEY: self._grid_of_init} | local_metadata)

    def _format_output(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor | tuple[Tensor, Tensor]:
        """One layer's output, as `out_type` says."""
        if self.out_type not in ("featmap", WITH_CLASS_TOKEN):
            return super()._format_output(tokens, grid)
        patches = tokens[:, self.num_extra_tokens :].unflatten(1, tuple(grid))  # B h w D
        # Not MMPretrain's permuted view: some decoders take views of it themselves.
        feature_map = patches.permute(0, 3, 1, 2).contiguous()
        return feature_map if self.out_type == "featmap" else (feature_map, tokens[:, 0])

    def _check_out_indices(self, given: SupportsIndex | Sequence[SupportsIndex]) -> None:
        """MMPretrain's own check lets the number of layers pass, and returns each layer once, in order."""
        indices = self.out_indices
        if not indices or indices != sorted(set(indices)) or indices[-1] >= self.num_layers:
            raise ValueError(
                f"out_indices={given}: the backbone has the layers 0..{self.num_layers - 1}; name them in "
                "ascending order, each once"
            )


def _own_list(indices: SupportsIndex | Sequence[SupportsIndex]) -> int | list[int]:
    """Output layers as MMPretrain takes them, which resolves negative ones in place; others it refuses."""
    if hasattr(indices, "__index__"):
        return operator.index(indices)
    return [operator.index(i) for i in indices] if isinstance(indices, Sequence) else indices


def _check_checkpoint(vit: MaPeTViT, state_dict: dict[str, Tensor], prefix: str) -> None:
    """Refuse another network's weights, and those of which a backbone by itself would get no layer.

    MMEngine logs what is missing and trains on from random weights.
    """
    if f"{prefix}dist_token" in state_dict and not hasattr(vit, "dist_token"):
        raise ValueError(
            f"the checkpoint has a distillation token (`{prefix}dist_token`), which a plain ViT has not: use "
            "weights without one, or MMPretrain's DistilledVisionTransformer as backbone"
        )
    if prefix:
        return  # a model may be given weights that are not its backbone's
    own = vit.state_dict().keys()  # without the wrappers that parameters' names have
    layers = [name for name in own if name.startswith("layers.")]
    others = [name for name in state_dict if name not in own and name != "mask_token"]
    if not others or not state_dict.keys().isdisjoint(layers):
        return
    behind = (name.removesuffix(layer) for name in others for layer in layers if name.endswith(f".{layer}"))
    if found := next(behind, None):
        raise ValueError(
            f"the checkpoint has its weights behind `{found}`: add prefix='{found}' to the backbone's "
            "`init_cfg`"
        )
    raise ValueError(
        f"the checkpoint has none of the backbone's layers, but `{others[0]}`, ...: convert it with "
        "tools/convert.py"
    )


def _adapt_checkpoint(vit: MaPeTViT, state_dict: dict[str, Tensor], prefix: str, *_) -> None:
    """Rename BEiT's parameters; drop a pre-training mask token, for downstream every patch is visible."""
    if layers := beit_to_vit(state_dict, prefix):
        print_log(f"Renamed the parameters of {layers} BEiT layers to a plain ViT's.", logger="current")
    if not hasattr(vit, "mask_token") and state_dict.pop(f"{prefix}mask_token", None) is not None:
        print_log(f"Dropped `{prefix}mask_token`: only pre-training masks patches.", logger="current")


@MODELS.register_module()
class MaPeTPretrainViT(TwoStreamViT, MaPeTViT):
    """Two-stream Vision Transformer that embeds targets for token prediction (paper, Section 4.1).

    Linear layers are called as modules only where they have hooks or are others (LoRA), and then on all rows;
    a layer's `attn` is never called as a whole, so hooks on it do not run (see `TwoStreamLayer`).

    Args:
        arch: as for `MaPeTViT`.
        img_size: as for `MaPeTViT`; the images must have this size.
        patch_size: as for `MaPeTViT`.
        cutting_point: number of tokens of the permuted sequence that are context, including the class token;
            in `1 .. N-1`, with `N` the number of patches plus one. The paper's: 50 for ViT-T and S, 60 for B.
        objective: 'mapet' | 'pim' | 'mim'.
        recompute: compute GELU again in the backward pass instead of keeping its result, and LayerNorm where
            autocast would keep a copy of it: a quarter less memory, a little slower (docs/performance.md).
            Without effect in evaluation and where `with_cp`, a compiler or a trace decides what is kept.
        **kwargs: as for `MaPeTViT`, `with_cp` and `drop_path_rate` among them; and `query_from_layer`, the
            first layer that runs the query stream (an extension: see `TwoStreamViT`), by default 0.

    Raises:
        ValueError: the objective is not known, the cutting point is outside `1 .. N-1`, the objective or the
            depth has no place for `query_from_layer`, the class token or the final norm, which the method
            needs, is switched off, or another `out_type` is asked for.
    """

    layer_type = TwoStreamLayer

    def __init__(
        self,
        arch: str | dict = "deit-base",
        img_size: SupportsIndex | Iterable[SupportsIndex] = 224,
        patch_size: SupportsIndex | Iterable[SupportsIndex] = 16,
        cutting_point: SupportsIndex = 60,
        objective: str = "mapet",
        recompute: bool = True,
        **kwargs,
    ) -> None:
        check_trainable(kwargs)
        super().__init__(
            arch,
            img_size,
            patch_size,
            out_type="raw",
            cutting_point=cutting_point,
            objective=objective,
            **kwargs,
        )
        for layer in self.layers:
            layer.recompute = recompute

    def draw_weights(self) -> None:
        super().draw_weights()
        init_truncated_normal(self.mask_token)
