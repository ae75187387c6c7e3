"""timm's ViTs as a backbone: plain ones, EVA-02, DINOv3, those with register tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from mmengine.logging import print_log
from mmpretrain.models.backbones import TIMMBackbone
from torch import Tensor, nn

from mapet_mm.models.backbones.checkpoint_hooks import OF_TIMM
from mapet_mm.models.backbones.timm_weights import (
    SourceError,
    adapt_timm_checkpoint,
    fit_timm_bands,
    of_backbone,
    read_source,
)
from mapet_mm.models.backbones.vit import MAPS
from mapet_mm.models.utils.feature_maps import cut_padding
from mapet_mm.registry import MODELS
from mapet_mm.weight_files import only_safe_globals, read_weights

KINDS = ("VisionTransformer", "Eva")


@MODELS.register_module()
class TIMMViT(TIMMBackbone):
    """A ViT of timm, plain or continued by `mapet-mm pretrain`, as a backbone for any OpenMMLab model.

    Takes timm's classes `VisionTransformer` and `Eva`: DINOv2, DINOv3, EVA-02, CLIP's, plain ones. Images may
    have any size: positions and angles are those that timm has at that size, and of a side that is no
    multiple of the patch a map leaves out what the padding answered.

    A checkpoint that is loaded into the backbone, by `init_cfg` for example, has to be of the same network:
    `epoch_N.pth` of a RUN with `prefix="backbone."`. Its mask token is dropped, and position embeddings of
    another size are resized; anything else that does not fit is refused.

    Args:
        model_name: timm's name of the model, with random weights unless `pretrained` or an `init_cfg` brings
            some; or what has architecture and weights: a RUN of `mapet-mm pretrain` that continued a ViT of
            another library (its last epoch), its `epoch_N.pth`, or a folder of timm's, such as RUN/timm, with
            or without `local-dir:` before it.
        pretrained: take timm's weights of the name.
        out_indices: the layers whose output is returned, in ascending order; negative from the end.
        out_type: 'featmap' `(B, D, h, w)` | 'featmap_and_cls_token' (a pair of both for each layer, as
            MMSegmentation's DPT head takes it) | 'cls_token' `(B, D)` | 'avg_featmap' (mean of the patch
            tokens) | 'raw' `(B, N, D)`, class token and registers first.
        final_norm: normalise the output of the last layer; without it the backbone has no such norm.
        frozen_stages: number of layers that are not trained, and the embedding with them; all layers: nothing
            is.
        norm_eps: what the norms add to the variance, if weights of another library want another value than
            timm's; a RUN says it.
        checkpoint_path: file of weights of `model_name`, of timm's names or a RUN's.
        features_only: has no effect; `TIMMBackbone` needs it for maps.
        **kwargs: as for `TIMMBackbone` and of timm's model: `img_size`, `drop_path_rate`, `init_cfg`, ...

    Raises:
        ValueError: a model that is no such ViT, an output that it does not have, a folder without a model, or
            an `init_cfg` beside other weights.

    Examples:
        >>> vit = TIMMViT("vit_tiny_patch16_224", out_indices=[2, 11])
        >>> [tuple(each.shape) for each in vit(torch.randn(1, 3, 77, 101))]
        [(1, 192, 5, 7), (1, 192, 5, 7)]
    """

    OUT_TYPES = (*MAPS, "cls_token", "avg_featmap", "raw")
    # A pre-training has one image size, and `mapet-mm pretrain` checks the weights that it starts from.
    takes_any_size = True

    def __init__(
        self,
        model_name: str,
        pretrained: bool = False,
        out_indices: int | Sequence[int] = -1,
        out_type: str = "featmap",
        final_norm: bool = True,
        frozen_stages: int = -1,
        norm_eps: float | None = None,
        checkpoint_path: str = "",
        features_only: bool = True,
        init_cfg: dict | list[dict] | None = None,
        **kwargs: Any,
    ) -> None:
        network, weights = read_source(model_name)
        if checkpoint_path:
            weights = of_backbone(read_weights(checkpoint_path))
        has_weights = pretrained or weights is not None
        if has_weights and init_cfg:
            raise SourceError(f"{model_name}: the weights come with the model: leave `init_cfg` out")
        network_eps = network.pop("norm_eps", None)
        if self.takes_any_size:
            network.update(dynamic_img_size=True, dynamic_img_pad=True)
        network.update(kwargs)
        try:
            # timm loads with PyTorch's list of what a file may hold, not MMEngine's.
            with only_safe_globals():
                super().__init__(pretrained=pretrained and weights is None, init_cfg=init_cfg, **network)
        except TypeError as error:  # the network has no such argument
            kinds = " and ".join(KINDS)
            raise SourceError(f"{model_name}: {error}: it is none of timm's {kinds}?") from error
        vit = self.timm_model
        self._require_known(vit)
        self._set_norms(network_eps if norm_eps is None else norm_eps, final_norm)
        self.embed_dims = vit.embed_dim
        self.num_extra_tokens = vit.num_prefix_tokens
        self.img_size = vit.patch_embed.img_size
        self.patch_resolution = vit.patch_embed.grid_size
        self.out_type = self._known_out_type(out_type)
        self.out_indices = self._layer_indices(out_indices)
        self.frozen_stages = frozen_stages

        for module in (self, vit):
            module.register_load_state_dict_pre_hook(fit_timm_bands)
        if self.takes_any_size:
            self.register_load_state_dict_pre_hook(adapt_timm_checkpoint)
        if weights is not None:
            self.load_state_dict(weights)
        if has_weights:
            self.is_init = True
        self._freeze()

    def _require_known(self, vit: nn.Module) -> None:
        """Raise ValueError for a model that has not the parts of timm's ViTs."""
        kind = type(vit).__name__
        if kind not in KINDS:
            raise SourceError(
                f"timm's {kind} is none of {', '.join(KINDS)}: mmpretrain.TIMMBackbone takes it"
            )

    def _set_norms(self, eps: float | None, final_norm: bool) -> None:
        """Set what all norms add to the variance, and leave out the one after the last layer."""
        for module in self.timm_model.modules():
            if isinstance(module, nn.LayerNorm) and eps is not None:
                module.eps = eps
        if not final_norm:
            self.timm_model.norm = nn.Identity()
            self.timm_model.fc_norm = nn.Identity()

    def _known_out_type(self, out_type: str) -> str:
        """The `out_type` itself; ValueError if there is none such."""
        if out_type not in self.OUT_TYPES:
            raise SourceError(f"out_type={out_type!r}: there are {', '.join(self.OUT_TYPES)}")
        if "cls_token" in out_type and self.timm_model.cls_token is None:
            raise SourceError(f"out_type={out_type!r}: the model has no class token")
        return out_type

    def _layer_indices(self, out_indices: int | Sequence[int]) -> list[int]:
        """The layers of `out_indices`, counted from the first; ValueError for one that there is not."""
        num_layers = len(self.layers)
        indices = [out_indices] if isinstance(out_indices, int) else list(out_indices)
        if not all(-num_layers <= index < num_layers for index in indices):
            raise SourceError(f"out_indices={out_indices}: the model has {num_layers} layers")
        return [index % num_layers for index in indices]

    @property
    def layers(self) -> nn.ModuleList | nn.Sequential:
        """The layers; as an attribute their weights would be saved twice."""
        return self.timm_model.blocks

    def init_weights(self) -> None:
        """Draw timm's initial weights, or load those of `init_cfg`; none if they came with the model."""
        if self.is_init:
            return
        if not self.init_cfg:
            print_log(
                f"{type(self).__name__} starts from random weights: `pretrained`, an `init_cfg`, or a RUN as "
                "`model_name` brings others",
                "current",
            )
        super().init_weights()

    def _frozen_parts(self) -> list[nn.Module]:
        """The modules that are not trained."""
        parts = dict(self.timm_model.named_children())
        after_layers = ("blocks", "norm", "fc_norm")
        embedding = [part for name, part in parts.items() if name not in after_layers]
        return [*embedding, *self.layers[: self.frozen_stages]]

    def _freeze(self) -> None:
        """Freeze the first stages."""
        if self.frozen_stages < 1:
            return
        is_whole = self.frozen_stages >= len(self.layers)
        parts = [self.timm_model] if is_whole else self._frozen_parts()
        frozen = [*self.timm_model.parameters(recurse=False)]  # class token, registers, positions
        for part in parts:
            frozen.extend(part.parameters())
        for parameter in frozen:
            parameter.requires_grad = False

    def train(self, mode: bool = True) -> "TIMMViT":
        """Set the mode; frozen stages, or a wholly frozen backbone, stay in evaluation mode."""
        super().train(mode and self.frozen_stages < len(self.layers))
        if self.frozen_stages > 0:
            for part in self._frozen_parts():
                part.eval()
        return self

    def forward(
        self, images: Float[Tensor, "batch channel height width"]
    ) -> tuple[Tensor, ...] | tuple[tuple[Tensor, Tensor], ...]:
        """The output of each layer of `out_indices`, as `out_type` says; maps cover the image exactly."""
        has_extra_tokens = self.num_extra_tokens > 0
        layers = self.timm_model.forward_intermediates(
            images,
            indices=self.out_indices,
            return_prefix_tokens=has_extra_tokens,
            output_fmt="NLC",
            intermediates_only=True,
        )
        outputs = []
        for index, tokens in zip(sorted({*self.out_indices}), layers, strict=True):
            if has_extra_tokens:
                patches, extra = tokens
                tokens = torch.cat([extra, patches], dim=1)  # B N D
            if index == len(self.layers) - 1:
                tokens = self.timm_model.fc_norm(self.timm_model.norm(tokens))
            outputs.append(self._as_output(tokens, images.shape[-2:]))
        return tuple(outputs)

    def _as_output(
        self, tokens: Float[Tensor, "batch token dim"], image_size: torch.Size
    ) -> Tensor | tuple[Tensor, Tensor]:
        """One layer's output, as `out_type` says."""
        if self.out_type == "raw":
            return tokens
        if self.out_type == "cls_token":
            return tokens[:, 0]
        patches = tokens[:, self.num_extra_tokens :]
        if self.out_type == "avg_featmap":
            return patches.mean(dim=1)
        embedding = self.timm_model.patch_embed
        grid = embedding.dynamic_feat_size(image_size)
        feature_map = patches.unflatten(1, grid).permute(0, 3, 1, 2).contiguous()  # B D h w
        feature_map = cut_padding(feature_map, image_size, embedding.patch_size)
        return feature_map if self.out_type == "featmap" else (feature_map, tokens[:, 0])

    def get_layer_depth(self, param_name: str, prefix: str = "") -> tuple[int, int]:
        """Depth of a parameter and number of depths, as MMPretrain's ViTs count them."""
        num_depths = len(self.layers) + 2
        name = param_name.removeprefix(prefix)
        if not param_name.startswith(prefix) or not name.startswith(OF_TIMM):
            return num_depths - 1, num_depths  # a head or the mask token
        part, _, rest = name.removeprefix(OF_TIMM).partition(".")
        if part == "blocks":
            return int(rest.partition(".")[0]) + 1, num_depths
        is_last = part in ("norm", "fc_norm")
        return num_depths - 1 if is_last else 0, num_depths
