"""Tokens of every layer of MMPretrain's, timm's and Hugging Face's ViTs; of other backbones the last map."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torchvision
from jaxtyping import Float
from mmpretrain.models import BEiTViT, HuggingFaceClassifier, TimmClassifier, VisionTransformer
from torch import Tensor, nn
from torch.fx import GraphModule
from torchvision.models.feature_extraction import create_feature_extractor

from mapet_mm.utils.errors import UserError
from mapet_mm.utils.precision import choose_dtype

Images = Float[Tensor, "batch channel height width"]
OUTPUT = "output"  # the name of the last layer behind the final norm


class BackboneError(UserError):
    """A backbone whose output has no known layout."""


class LayerTokens(NamedTuple):
    """A backbone's tokens of one batch; only the last layer, "output", has a final norm."""

    names: list[str]  # of the layers: "1", "2", ..., "output"
    class_token: Float[Tensor, "batch layer dim"] | None  # None if the backbone has none
    patches: Sequence[Float[Tensor, "batch patch dim"]] | None  # in raster order; None of vectors
    grid: tuple[int, int]  # (H, W) of the patches; (0, 0) without patches

    @property
    def poolings(self) -> list[str]:
        """The pooled features that `pooled` joins."""
        return ["class token"] * (self.class_token is not None) + ["mean"] * (self.patches is not None)

    def pooled(self) -> Float[Tensor, "layer batch width"]:
        """Class token and patch mean side by side, or the one that there is, in float32."""
        parts = [] if self.class_token is None else [self.class_token.transpose(0, 1).float()]
        if self.patches is not None:
            parts.append(torch.stack([one.float().mean(1) for one in self.patches]))
        return torch.cat(parts, dim=-1)


def split_tokens(
    tokens: Sequence[Float[Tensor, "batch token dim"]],
    num_extra_tokens: int,
    grid: Sequence[int],
    has_class_token: bool,
    has_norm: bool,
) -> LayerTokens:
    """Layers' tokens with the extra tokens in front; the first of these is the class token if there is one.

    Raises:
        BackboneError: the other tokens do not fill the grid.
    """
    count = tokens[0].shape[1] - num_extra_tokens
    if count != grid[0] * grid[1]:
        raise BackboneError(f"the backbone gives {count} patches for a grid of {grid[0]} x {grid[1]}")
    names = [str(place) for place in range(1, 1 + len(tokens))]
    if has_norm:
        names[-1] = OUTPUT
    class_token = torch.stack([one[:, 0] for one in tokens], dim=1) if has_class_token else None
    return LayerTokens(names, class_token, [one[:, num_extra_tokens:] for one in tokens], tuple(grid))


def mmpretrain_tokens(vit: VisionTransformer | BEiTViT, images: Images) -> LayerTokens:
    """Layers of MMPretrain's VisionTransformer, BEiTViT and their subclasses."""
    # A two-stream ViT permutes in `forward`; one of a masked pre-training masks unless `mask` is None.
    forward = getattr(vit, "encode", vit)
    masks = forward is vit and "mask" in inspect.signature(vit.forward).parameters
    before = vit.out_type, vit.out_indices, vit.final_norm
    vit.out_type, vit.out_indices, vit.final_norm = "raw", list(range(len(vit.layers))), False
    try:
        tokens = list(forward(images, **({"mask": None} if masks else {})))
    finally:
        vit.out_type, vit.out_indices, vit.final_norm = before
    if vit.final_norm:
        tokens.append(vit.ln1(tokens[-1]))
    sizes = zip(images.shape[-2:], vit.img_size, vit.patch_resolution, strict=True)
    grid = [size * patches // built for size, built, patches in sizes]
    return split_tokens(tokens, vit.num_extra_tokens, grid, vit.num_extra_tokens > 0, vit.final_norm)


def timm_tokens(model: nn.Module, images: Images) -> LayerTokens:
    """Layers of timm's models with `forward_intermediates`: all of a ViT, the last stage of others."""
    if "return_prefix_tokens" not in inspect.signature(model.forward_intermediates).parameters:
        options = dict(indices=1, norm=True, intermediates_only=True)
        return map_tokens(model.forward_intermediates(images, output_fmt="NCHW", **options)[-1])
    last, layers = model.forward_intermediates(images, output_fmt="NCHW", return_prefix_tokens=True)
    tokens = [torch.cat([extra, patches.flatten(2).mT], dim=1) for patches, extra in layers]
    # Models that average the patches have their final norm behind that, as `fc_norm`.
    norms = [model.norm, getattr(model, "fc_norm", nn.Identity())]
    has_norm = any(not isinstance(norm, nn.Identity) for norm in norms)
    tokens += [norms[1](last)] * has_norm
    has_class_token = getattr(model, "cls_token", None) is not None
    return split_tokens(tokens, model.num_prefix_tokens, layers[-1][0].shape[2:], has_class_token, has_norm)


def hugging_face_tokens(model: nn.Module, images: Images) -> LayerTokens:
    """Layers of Hugging Face's ViTs with extra tokens in front: ViT, DeiT, BEiT, DINOv2, CLIP, SigLIP, ..."""
    known = inspect.signature(model.forward).parameters  # ViT takes one size without this option
    options = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in known else {}
    output = model(images, output_hidden_states=True, **options)
    _, *tokens = output.hidden_states  # the first are the embeddings
    if any(one.shape != tokens[0].shape for one in output.hidden_states) or tokens[0].ndim != 3:
        raise BackboneError(f"{type(model).__name__} has stages: only Hugging Face's plain ViTs are known")
    has_norm = output.last_hidden_state is not tokens[-1]
    tokens += [output.last_hidden_state] * has_norm
    patch = model.config.patch_size
    sides = patch if isinstance(patch, list | tuple) else (patch, patch)
    grid = [size // side for size, side in zip(images.shape[-2:], sides, strict=True)]
    extra = tokens[0].shape[1] - grid[0] * grid[1]
    return split_tokens(tokens, extra, grid, extra > 0, has_norm)


def torchvision_layers(model: nn.Module) -> nn.Module:
    """A model of torchvision with the layers of a ViT, or the last feature map, as its outputs."""
    if isinstance(model, torchvision.models.VisionTransformer):
        names = [f"encoder.layers.encoder_layer_{place}" for place in range(len(model.encoder.layers))]
        return create_feature_extractor(model, [*names, "encoder.ln"])
    names = ("layer4", "trunk_output", "permute", "features")  # ResNets, RegNets, Swin, the others
    found = [name for name in names if hasattr(model, name)]
    if not found:
        raise BackboneError(f"the last feature map of torchvision's {type(model).__name__} is not known")
    return create_feature_extractor(model, found[:1])


def torchvision_tokens(model: nn.Module, images: Images) -> LayerTokens:
    """Layers of a model of `torchvision_layers`: all of a ViT, the last map of others."""
    *tokens, last = model(images).values()
    if last.ndim == 4:
        return map_tokens(last)
    grid = [size // side for size, side in zip(images.shape[-2:], model.conv_proj.kernel_size, strict=True)]
    return split_tokens([*tokens, last], 1, grid, has_class_token=True, has_norm=True)


def last_output(backbone: nn.Module, images: Images) -> LayerTokens:
    """The one layer of a backbone whose last output is a feature map `(B, D, H, W)` or a vector `(B, D)`."""
    output = backbone(images)
    while isinstance(output, list | tuple) and output:  # of several stages
        output = output[-1]
    if isinstance(output, Tensor) and output.ndim == 2:
        return LayerTokens([OUTPUT], output[:, None], None, (0, 0))
    if not isinstance(output, Tensor) or output.ndim != 4:
        raise BackboneError(
            f"{type(backbone).__name__} gives neither a feature map (B, D, H, W) nor a vector (B, D): set "
            "its output type, or add it to mapet_mm/evaluation/adapters.py"
        )
    return map_tokens(output)


def map_tokens(features: Float[Tensor, "batch dim height width"]) -> LayerTokens:
    """A feature map as the patches of one layer."""
    return LayerTokens([OUTPUT], None, [features.flatten(2).mT], tuple(features.shape[2:]))


def network_of(model: nn.Module) -> nn.Module:
    """The network inside a model: without neck and head, and without the wrapper of timm or Hugging Face."""
    wrapped = isinstance(model, HuggingFaceClassifier | TimmClassifier)
    network = model.model if wrapped else getattr(model, "backbone", model)
    network = getattr(network, "timm_model", network)
    return getattr(network, "base_model", network)


def adapter_of(network: nn.Module) -> Callable[[nn.Module, Images], LayerTokens]:
    """The function above that reads a network of `network_of`."""
    if isinstance(network, VisionTransformer | BEiTViT):
        return mmpretrain_tokens
    if hasattr(network, "forward_intermediates"):
        return timm_tokens
    if isinstance(network, GraphModule):
        return torchvision_tokens
    return hugging_face_tokens if hasattr(network, "config") else last_output


class TokenBackbone:
    """A model's backbone as a source of tokens.

    Args:
        model: a pre-training, a classifier, a segmentor or a backbone, in evaluation mode.
        preprocessor: data preprocessor with mean and standard deviation; the model's own by default.
    """

    def __init__(self, model: nn.Module, preprocessor: nn.Module | None = None) -> None:
        self.model = model
        self.preprocessor = preprocessor or getattr(model, "data_preprocessor", None)
        self.network = network_of(model)
        self.adapter = adapter_of(self.network)

    @property
    def device(self) -> torch.device:
        """The model's device; the CPU for a model without parameters."""
        return next(self.model.parameters(), torch.empty(0)).device

    def normalise(self, images: Tensor | Sequence[Tensor]) -> Images:
        """Images of a pipeline as the data preprocessor would hand them on, whatever else it needs."""
        images = images if isinstance(images, Tensor) else torch.stack(list(images))
        images = images.to(self.device, non_blocking=True).float()
        if swaps_channels(self.preprocessor):
            images = images.flip(1)
        mean, std = (getattr(self.preprocessor, name, None) for name in ("mean", "std"))
        return images if mean is None else (images - mean) / std

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of autocast on CUDA; None elsewhere, where features are taken in float32."""
        return choose_dtype("cuda") if self.device.type == "cuda" else None

    @torch.no_grad()
    def __call__(self, images: Images) -> LayerTokens:
        """Tokens of each layer, of normalised images."""
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            return self.adapter(self.network, images)


def swaps_channels(preprocessor: nn.Module | None) -> bool:
    """True if a data preprocessor turns BGR into RGB or back.

    MMPretrain's for classification keeps this as `to_rgb`; MMEngine's, and its subclasses, as
    `_channel_conversion`; the original MMSegmentation's as `channel_conversion`.
    """
    names = ("_channel_conversion", "channel_conversion", "to_rgb")
    return bool(next((getattr(preprocessor, name) for name in names if hasattr(preprocessor, name)), False))
