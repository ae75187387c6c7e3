"""Tokens of every layer of MMPretrain's, timm's and Hugging Face's ViTs; of other backbones the last map."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from mmengine.utils import to_2tuple
from mmpretrain.models import BEiTViT, HuggingFaceClassifier, TimmClassifier, VisionTransformer
from torch import Tensor, nn

from mapet_mm.utils.errors import UserError
from mapet_mm.utils.precision import choose_dtype

Images = Float[Tensor, "batch channel height width"]
OUTPUT = "output"  # the name of the last layer after the final norm


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
        found = []
        if self.class_token is not None:
            found.append("class token")
        if self.patches is not None:
            found.append("mean")
        return found

    def pooled(self, layer: int = -1) -> Float[Tensor, "batch width"]:
        """A layer's class token and patch mean side by side, or the one that there is, in float32."""
        parts = []
        if self.class_token is not None:
            parts.append(self.class_token[:, layer].float())  # B D
        if self.patches is not None:
            parts.append(self.patches[layer].float().mean(1))  # B D
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
    names = [str(number) for number in range(1, 1 + len(tokens))]
    if has_norm:
        names[-1] = OUTPUT
    class_token = None
    if has_class_token:
        class_token = torch.stack([layer[:, 0] for layer in tokens], dim=1)  # B L D
    patches = [layer[:, num_extra_tokens:] for layer in tokens]
    return LayerTokens(names, class_token, patches, tuple(grid))


def mmpretrain_tokens(vit: VisionTransformer | BEiTViT, images: Images) -> LayerTokens:
    """Layers of MMPretrain's VisionTransformer, BEiTViT and their subclasses."""
    # A two-stream ViT permutes in `forward`; one of a masked pre-training masks unless `mask` is None.
    forward = getattr(vit, "encode", vit)
    options = {}
    if forward is vit and "mask" in inspect.signature(vit.forward).parameters:
        options["mask"] = None
    tokens = layer_outputs(vit.layers, partial(forward, images, **options))
    if vit.final_norm:
        tokens.append(vit.ln1(tokens[-1]))
    # The patch grid of images of this size.
    grid = []
    for size, built_for, patches in zip(images.shape[-2:], vit.img_size, vit.patch_resolution, strict=True):
        grid.append(size * patches // built_for)
    return split_tokens(tokens, vit.num_extra_tokens, grid, vit.num_extra_tokens > 0, vit.final_norm)


def layer_outputs(layers: Iterable[nn.Module], run: Callable[[], Any]) -> list[Tensor]:
    """What each of some layers gives in a forward pass."""
    found = []

    def keep(layer: nn.Module, inputs: tuple, output: Tensor) -> None:
        found.append(output)

    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found


def timm_tokens(model: nn.Module, images: Images) -> LayerTokens:
    """Layers of timm's models with `forward_intermediates`: all of a ViT, the last stage of others."""
    if "return_prefix_tokens" not in inspect.signature(model.forward_intermediates).parameters:
        options = dict(indices=1, norm=True, intermediates_only=True)
        return map_tokens(model.forward_intermediates(images, output_fmt="NCHW", **options)[-1])
    with_prefix = model.num_prefix_tokens > 0
    last, layers = model.forward_intermediates(images, output_fmt="NCHW", return_prefix_tokens=with_prefix)
    if not with_prefix:  # then timm returns the maps alone
        layers = [(patches, last[:, :0]) for patches in layers]
    tokens = [torch.cat([extra, patches.flatten(2).mT], dim=1) for patches, extra in layers]  # B N D each
    # Models that average the patches have their final norm after that, as `fc_norm`.
    fc_norm = getattr(model, "fc_norm", nn.Identity())
    has_norm = not (isinstance(model.norm, nn.Identity) and isinstance(fc_norm, nn.Identity))
    if has_norm:
        tokens.append(fc_norm(last))
    has_class_token = getattr(model, "cls_token", None) is not None
    grid = layers[-1][0].shape[2:]
    return split_tokens(tokens, model.num_prefix_tokens, grid, has_class_token, has_norm)


def hugging_face_tokens(model: nn.Module, images: Images) -> LayerTokens:
    """Layers of Hugging Face's ViTs with extra tokens in front: ViT, DeiT, BEiT, DINOv2, CLIP, SigLIP, ..."""
    if not hasattr(model.config, "patch_size"):
        raise BackboneError(
            f"{type(model).__name__} is none of Hugging Face's plain ViTs, which alone are known"
        )
    sides = to_2tuple(model.config.patch_size)
    grid = [size // side for size, side in zip(images.shape[-2:], sides, strict=True)]
    options = {}
    known = inspect.signature(model.forward).parameters
    if "interpolate_pos_encoding" in known:
        options["interpolate_pos_encoding"] = True  # without it, ViT takes images of one size
    if "noise" in known:  # ViTMAE sorts the patches by it, also where it masks none
        options["noise"] = torch.arange(grid[0] * grid[1], device=images.device).expand(len(images), -1)
    output = model(images, output_hidden_states=True, **options)
    _, *tokens = output.hidden_states  # the first are the embeddings
    if any(one.shape != tokens[0].shape for one in output.hidden_states) or tokens[0].ndim != 3:
        raise BackboneError(f"{type(model).__name__} has stages: only Hugging Face's plain ViTs are known")
    has_norm = output.last_hidden_state is not tokens[-1]
    if has_norm:
        tokens.append(output.last_hidden_state)
    extra = tokens[0].shape[1] - grid[0] * grid[1]
    if extra < 0:
        raise BackboneError(f"{type(model).__name__} gives tokens of a part of the patches")
    return split_tokens(tokens, extra, grid, extra > 0, has_norm)


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
            "its output type, or add it to mapet_mm/evaluation/tokens.py"
        )
    return map_tokens(output)


def map_tokens(features: Float[Tensor, "batch dim height width"]) -> LayerTokens:
    """A feature map as the patches of one layer."""
    return LayerTokens([OUTPUT], None, [features.flatten(2).mT], tuple(features.shape[2:]))


def network_of(model: nn.Module) -> nn.Module:
    """The network inside a model: without neck and head, and without the wrapper of timm or Hugging Face."""
    if isinstance(model, HuggingFaceClassifier):
        return model.model.base_model
    if isinstance(model, TimmClassifier):
        return model.model
    network = getattr(model, "backbone", model)
    return getattr(network, "timm_model", network)


class Adapter(NamedTuple):
    """How a library's networks are read.

    Args:
        tokens: one of the functions above.
        parts: first names of the weights that such a network may have and features then depend on.
    """

    tokens: Callable[[nn.Module, Images], LayerTokens]
    parts: tuple[str, ...] = ()

    def reads(self, network: nn.Module) -> set[str]:
        """First names of the weights on which a network's features depend, those included that it lacks."""
        return {*self.parts, *(name.partition(".")[0] for name in network.state_dict())}


EXTRAS = ("cls_token", "reg_token", "dist_token", "pos_embed", "rope", "rel_pos_bias")
MMPRETRAIN = Adapter(mmpretrain_tokens, (*EXTRAS, "pre_norm"))
TIMM = Adapter(timm_tokens, (*EXTRAS, "norm_pre"))
HUGGING_FACE = Adapter(hugging_face_tokens)
OTHERS = Adapter(last_output)


def adapter_of(network: nn.Module) -> Adapter:
    """The adapter of a network of `network_of`."""
    if isinstance(network, VisionTransformer | BEiTViT):
        return MMPRETRAIN
    if hasattr(network, "forward_intermediates"):
        return TIMM
    if hasattr(network, "config"):
        return HUGGING_FACE
    return OTHERS


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
        mean = getattr(self.preprocessor, "mean", None)
        std = getattr(self.preprocessor, "std", None)
        if mean is None:
            return images
        if len(mean) not in (1, images.shape[1]):
            raise BackboneError(
                f"the images have {images.shape[1]} bands, the model's mean and standard deviation are of "
                f"{len(mean)}: take others by --bands, or give --mean and --std a value for each band"
            )
        return (images - mean) / std

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of autocast on CUDA; None elsewhere, where features are taken in float32."""
        return choose_dtype("cuda") if self.device.type == "cuda" else None

    @torch.no_grad()
    def __call__(self, images: Images) -> LayerTokens:
        """Tokens of each layer, of normalised images."""
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            return self.adapter.tokens(self.network, images)


def swaps_channels(preprocessor: nn.Module | None) -> bool:
    """True if a data preprocessor turns BGR into RGB or back.

    MMPretrain's for classification keeps this as `to_rgb`; MMEngine's, and its subclasses, as
    `_channel_conversion`; the original MMSegmentation's as `channel_conversion`.
    """
    for name in ("_channel_conversion", "channel_conversion", "to_rgb"):
        if hasattr(preprocessor, name):
            return bool(getattr(preprocessor, name))
    return False
