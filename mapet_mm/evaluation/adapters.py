"""Tokens of every layer of MMPretrain's, timm's and Hugging Face's ViTs; of other backbones the last map."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from mmpretrain.models import BEiTViT, HuggingFaceClassifier, TimmClassifier, VisionTransformer
from torch import Tensor, nn

from mapet_mm.utils.errors import UserError

OUTPUT = "output"  # the name of the last layer behind the final norm


class BackboneError(UserError):
    """A backbone whose output has no known layout."""


class LayerTokens(NamedTuple):
    """A backbone's tokens of one batch.

    Args:
        names: of the layers, "1", "2", ..., "output". The numbered layers have no final norm.
        class_token: of each layer `(B, L, D)`; None if the backbone has none.
        patches: of each layer `(B, N, D)`, in raster order; None if the features are vectors.
        grid: (H, W) of the patches; (0, 0) without patches.
    """

    names: list[str]
    class_token: Float[Tensor, "batch layer dim"] | None
    patches: Sequence[Float[Tensor, "batch patch dim"]] | None
    grid: tuple[int, int]

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
    names: list[str],
    tokens: Sequence[Float[Tensor, "batch token dim"]],
    num_extra_tokens: int,
    grid: tuple[int, int],
    has_class_token: bool,
) -> LayerTokens:
    """Layers' tokens with the extra tokens in front; the first of these is the class token if there is one.

    Raises:
        BackboneError: the other tokens do not fill the grid.
    """
    count = tokens[0].shape[1]
    if count - num_extra_tokens != grid[0] * grid[1]:
        raise BackboneError(
            f"the backbone gives {count} tokens, {num_extra_tokens} of them extra, for a grid of "
            f"{grid[0]} x {grid[1]} patches"
        )
    class_token = torch.stack([one[:, 0] for one in tokens], dim=1) if has_class_token else None
    return LayerTokens(names, class_token, [one[:, num_extra_tokens:] for one in tokens], grid)


def numbered(count: int, has_norm: bool) -> list[str]:
    """Names of so many layers and of the normed output."""
    return [*map(str, range(1, count + 1)), *[OUTPUT] * has_norm]


class MMPretrainAdapter:
    """MMPretrain's VisionTransformer and BEiTViT, and their subclasses here and there.

    Args:
        vit: runs with `out_type="raw"` for all layers during a call; its own settings come back after it.
    """

    def __init__(self, vit: VisionTransformer | BEiTViT) -> None:
        self.vit = vit
        # A two-stream ViT permutes in `forward`; one of a masked pre-training masks unless `mask` is None.
        self.forward = getattr(vit, "encode", vit)
        masks = self.forward is vit and "mask" in inspect.signature(vit.forward).parameters
        self.options = {"mask": None} if masks else {}

    def __call__(self, images: Float[Tensor, "batch channel height width"]) -> LayerTokens:
        vit, count = self.vit, len(self.vit.layers)
        before = vit.out_type, vit.out_indices, vit.final_norm
        vit.out_type, vit.out_indices, vit.final_norm = "raw", list(range(count)), False
        try:
            tokens = list(self.forward(images, **self.options))
        finally:
            vit.out_type, vit.out_indices, vit.final_norm = before
        if vit.final_norm:
            tokens.append(vit.ln1(tokens[-1]))
        sizes = zip(images.shape[-2:], vit.img_size, vit.patch_resolution, strict=True)
        grid = tuple(size * patches // built for size, built, patches in sizes)
        extra = vit.num_extra_tokens
        return split_tokens(numbered(count, vit.final_norm), tokens, extra, grid, extra > 0)


class TimmAdapter:
    """timm's models with `forward_intermediates`: every layer of a ViT, the last stage of others.

    Args:
        model: timm's.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.is_vit = "return_prefix_tokens" in inspect.signature(model.forward_intermediates).parameters

    def __call__(self, images: Float[Tensor, "batch channel height width"]) -> LayerTokens:
        if not self.is_vit:
            options = dict(indices=1, norm=True, intermediates_only=True)
            return of_map(self.model.forward_intermediates(images, output_fmt="NCHW", **options)[-1])
        last, layers = self.model.forward_intermediates(images, output_fmt="NCHW", return_prefix_tokens=True)
        tokens = [torch.cat([extra, patches.flatten(2).mT], dim=1) for patches, extra in layers]
        # Models that average the patches have the norm behind that, as `fc_norm`.
        norms = [self.model.norm, getattr(self.model, "fc_norm", nn.Identity())]
        has_norm = any(not isinstance(norm, nn.Identity) for norm in norms)
        names, grid = numbered(len(tokens), has_norm), tuple(layers[-1][0].shape[2:])
        has_class_token = getattr(self.model, "cls_token", None) is not None
        tokens += [norms[1](last)] * has_norm
        return split_tokens(names, tokens, self.model.num_prefix_tokens, grid, has_class_token)


class HuggingFaceAdapter:
    """Hugging Face's ViTs, with the extra tokens in front: ViT, DeiT, BEiT, DINOv2, CLIP, SigLIP, ...

    Args:
        model: without its classifier.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, images: Float[Tensor, "batch channel height width"]) -> LayerTokens:
        output = self.model(images, output_hidden_states=True)
        _, *tokens = output.hidden_states  # the first are the embeddings
        if any(one.shape != tokens[0].shape for one in output.hidden_states) or tokens[0].ndim != 3:
            raise BackboneError(f"{type(self.model).__name__} has stages: only Hugging Face's plain ViTs")
        names = numbered(len(tokens), has_norm := output.last_hidden_state is not tokens[-1])
        tokens += [output.last_hidden_state] * has_norm
        patch = self.model.config.patch_size
        sides = patch if isinstance(patch, list | tuple) else (patch, patch)
        grid = tuple(size // side for size, side in zip(images.shape[-2:], sides, strict=True))
        extra = tokens[0].shape[1] - grid[0] * grid[1]
        return split_tokens(names, tokens, extra, grid, extra > 0)


class LastOutputAdapter:
    """Any backbone by its last output: a feature map `(B, D, H, W)`, or a vector `(B, D)`.

    Args:
        backbone: gives one of these, or a list of stages with one of these at its end.
    """

    def __init__(self, backbone: nn.Module) -> None:
        self.backbone = backbone

    def __call__(self, images: Float[Tensor, "batch channel height width"]) -> LayerTokens:
        output = self.backbone(images)
        while isinstance(output, list | tuple) and output:
            output = output[-1]
        if isinstance(output, Tensor) and output.ndim == 2:
            return LayerTokens([OUTPUT], output[:, None], None, (0, 0))
        if not isinstance(output, Tensor) or output.ndim != 4:
            raise BackboneError(
                f"{type(self.backbone).__name__} gives neither a feature map (B, D, H, W) nor a vector "
                "(B, D): set its output type, or add an adapter to mapet_mm/evaluation/adapters.py"
            )
        return of_map(output)


def of_map(features: Float[Tensor, "batch dim height width"]) -> LayerTokens:
    """A feature map as the patches of one layer."""
    return LayerTokens([OUTPUT], None, [features.flatten(2).mT], tuple(features.shape[2:]))


def network_of(model: nn.Module) -> nn.Module:
    """The network inside a model: without neck and head, and without the wrapper of timm or Hugging Face."""
    wrapped = isinstance(model, HuggingFaceClassifier | TimmClassifier)
    network = model.model if wrapped else getattr(model, "backbone", model)
    network = getattr(network, "timm_model", network)
    return getattr(network, "base_model", network)


def adapter_of(network: nn.Module) -> Any:
    """The adapter for a network of `network_of`."""
    if isinstance(network, VisionTransformer | BEiTViT):
        return MMPretrainAdapter(network)
    if hasattr(network, "forward_intermediates"):
        return TimmAdapter(network)
    if hasattr(network, "config") and hasattr(network.config, "hidden_size"):
        return HuggingFaceAdapter(network)
    return LastOutputAdapter(network)


class TokenBackbone:
    """A model's backbone as a source of tokens.

    Args:
        model: a pre-training, a classifier, a segmentor or a backbone, in evaluation mode.
        preprocessor: data preprocessor with mean and standard deviation; the model's own by default.
    """

    def __init__(self, model: nn.Module, preprocessor: nn.Module | None = None) -> None:
        self.model = model
        self.preprocessor = preprocessor or getattr(model, "data_preprocessor", None)
        self.adapter = adapter_of(network_of(model))

    @property
    def device(self) -> torch.device:
        """The model's device; the CPU for a model without parameters."""
        return next(self.model.parameters(), torch.empty(0)).device

    def normalise(self, images: Tensor | Sequence[Tensor]) -> Float[Tensor, "batch channel height width"]:
        """Images of a pipeline as the data preprocessor would hand them on, whatever else it needs."""
        images = images if isinstance(images, Tensor) else torch.stack(list(images))
        images = images.to(self.device, non_blocking=True).float()
        if swaps_channels(self.preprocessor):
            images = images.flip(1)
        mean, std = (getattr(self.preprocessor, name, None) for name in ("mean", "std"))
        return images if mean is None else (images - mean) / std

    def __call__(self, images: Float[Tensor, "batch channel height width"]) -> LayerTokens:
        """Tokens of each layer, of normalised images."""
        return self.adapter(images)


def swaps_channels(preprocessor: nn.Module | None) -> bool:
    """True if a data preprocessor turns BGR into RGB or back.

    MMPretrain's for classification keeps this as `to_rgb`; MMEngine's, and its subclasses, as
    `_channel_conversion`; the original MMSegmentation's as `channel_conversion`.
    """
    names = ("_channel_conversion", "channel_conversion", "to_rgb")
    return bool(next((getattr(preprocessor, name) for name in names if hasattr(preprocessor, name)), False))
