"""Tokens by k-means of any encoder's grid features (as k-CLIP's, paper Section 3.3)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from mapet_mm.models.target_generators.base import Tokenizer, full_float32
from mapet_mm.models.target_generators.clip_tower import weights_digest
from mapet_mm.models.target_generators.frozen_tokenizer import (
    TokenizerError,
    build_frozen,
    no_weights,
    refuse_unloaded_weights,
    split_checkpoint,
)
from mapet_mm.models.target_generators.grid_layout import GridError, GridLayout, find_layout
from mapet_mm.registry import MODELS
from mapet_mm.structures.codebook import Codebook, CodebookError
from mapet_mm.utils.config import square, type_name, with_type_names


@MODELS.register_module()
class GridKMeans(Tokenizer):
    """Target generator: for each of an encoder's grid features, the index of its nearest centroid.

    The encoder is any module that takes normalised images: a backbone or a whole model of MMPretrain, of timm
    (`TIMMBackbone`), Hugging Face (`HuggingFaceClassifier`) or open_clip (`mapet_mm.OpenCLIPVisual`), or this
    package's `mapet_mm.MaPeTViT` with a pre-training's checkpoint. A trial pass finds the grid in its output,
    and the number of tokens before it.

    Args:
        encoder: its config, or the module itself. Weights come from `init_cfg=dict(type="Pretrained",
            checkpoint=..., prefix=...)`, which must have all of the encoder's, or from its constructor
            (`pretrained=True`).
        image_size: side of the input images in pixels.
        codebook: path of the codebook (or a `Codebook`); None to compute features only.
        layer: which output to take: an index if the encoder returns several, a key if it returns a dict, or
            the name of a submodule (`"layers.7"`, `"timm_model.blocks.8"`).
        random_seed: use the weights that the constructor draws from this seed, instead of trained ones.

    Raises:
        TokenizerError: an encoder without weights, with two sources of weights or weights that do not fit, or
            no such layer.
        GridError: the layer's output has no grid.
        CodebookError: the codebook cannot be read or was fitted on other features.
    """

    def __init__(
        self,
        encoder: Mapping[str, Any] | nn.Module,
        image_size: int = 224,
        codebook: str | os.PathLike | Codebook | None = None,
        layer: int | str = -1,
        random_seed: int | None = None,
        init_cfg: dict | None = None,
    ) -> None:
        # Looked at first: a wrong option should not cost the minutes of a weights download.
        image_size = square("image_size", image_size)
        if codebook is not None and not isinstance(codebook, Codebook):
            codebook = Codebook.load(codebook)
        config = split_checkpoint(encoder)[0] if isinstance(encoder, Mapping) else {}
        refuse_unloaded_weights("encoder", config, random_seed, init_cfg)
        if isinstance(encoder, Mapping) and "type" in encoder:
            network, weights = self._build(encoder, image_size, layer, random_seed)
        elif isinstance(encoder, nn.Module):
            network, weights = encoder, "given"
        else:
            raise TokenizerError(f"encoder is {encoder!r}: give dict(type=..., ...), or a module")
        super().__init__(network, image_size, init_cfg)
        self.layer, self.codebook = layer, codebook
        self.description = self._describe(encoder, weights)
        self.encoder_digest = weights_digest(network)
        self._layout = self._find_layout()
        if codebook is not None:
            self._check_codebook(codebook)

    @property
    def encoder(self) -> nn.Module:
        """The encoder."""
        return self._network[0]

    @property
    def dim(self) -> int:
        """Feature channels."""
        return self._layout.dim

    @property
    def grid(self) -> tuple[int, int]:
        """(H, W) tokens of an image of `image_size`."""
        return self._layout.rows, self._layout.columns

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._need_codebook().k

    @property
    def digest(self) -> str:
        """Identity: the codebook's digest if it records its encoder, else a digest of both."""
        codebook = self._need_codebook()
        if "encoder_digest" in codebook.metadata:  # and it is this one
            return codebook.digest
        identity = {key: value for key, value in self.metadata.items() if key != "weights"}
        return hashlib.sha256(json.dumps([codebook.digest, identity], sort_keys=True).encode()).hexdigest()

    @property
    def metadata(self) -> dict[str, Any]:
        """What a codebook fitted on these features records of the encoder."""
        return {
            **self.description,
            "encoder_digest": self.encoder_digest,
            "image_size": self.image_size,
        }

    @torch.no_grad()
    def features(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch grid dim"]:
        """Grid features (B, HW, D) in float32 of normalised images (B, 3, H, W)."""
        self.check_size(images)
        with full_float32(images.device):
            return self._layout.features(layer_output(self.encoder, images.float(), self.layer))

    @torch.no_grad()
    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Int64[Tensor, "batch grid"]:
        """Token ids (B, HW), int64, in raster order, of normalised images (B, 3, H, W)."""
        codebook = self._need_codebook()
        features = self.features(images)
        with full_float32(images.device):
            return codebook.assign(features)

    def _build(
        self, encoder: Mapping[str, Any], image_size: int, layer: int | str, random_seed: int | None
    ) -> tuple[nn.Module, str]:
        """The encoder, and its weights in words."""
        config, checkpoint = split_checkpoint(encoder)
        if checkpoint and random_seed is not None:
            raise TokenizerError(
                f"encoder {type_name(config['type'])} has both init_cfg=dict(type='Pretrained', "
                f"checkpoint={checkpoint.get('checkpoint')!r}) and random_seed={random_seed}: remove one"
            )
        network = build_frozen("encoder", config, checkpoint, random_seed or 0)
        if checkpoint:
            return network, os.path.basename(checkpoint["checkpoint"])
        if random_seed is not None:
            return network, f"random, seed {random_seed}"
        # Whether a constructor loads weights, only its features tell.
        other = build_frozen("encoder", config, checkpoint, 1)
        image = torch.linspace(-1, 1, 3 * image_size**2).reshape(1, 3, image_size, image_size)
        for model in (network, other):
            model.float().eval()
        with torch.no_grad():
            one, two = (layer_output(model, image, layer) for model in (network, other))
        if not torch.equal(one, two):
            raise TokenizerError(no_weights("encoder", config))
        return network, "the encoder's own"

    def _describe(self, encoder: Mapping[str, Any] | nn.Module, weights: str) -> dict[str, Any]:
        if isinstance(encoder, nn.Module):
            words = type(encoder).__name__
        else:
            config = with_type_names(split_checkpoint(encoder)[0])
            kind = config.pop("type")
            options = {key: "a file" if _is_file(value) else value for key, value in sorted(config.items())}
            words = f"{kind}({', '.join(f'{key}={value!r}' for key, value in options.items())})"
        return {"encoder": words, "weights": weights, "layer": self.layer}

    def _find_layout(self) -> GridLayout:
        device = next(self.encoder.parameters(), torch.empty(0)).device
        try:
            with full_float32(device):
                return find_layout(
                    lambda images: layer_output(self.encoder, images, self.layer), self.image_size, device
                )
        except GridError as error:
            raise GridError(
                f"layer {self.layer!r} of encoder {self.description['encoder']}: {error}; choose another "
                f"`layer`, for example the name of one of its submodules ({_names(self.encoder)}), or have "
                "the encoder return its feature map"
            ) from None

    def _need_codebook(self) -> Codebook:
        if self.codebook is None:
            raise CodebookError(
                f"{type(self).__name__} has no codebook: give `codebook=<path>`, fitted with "
                "tools/fit_codebook.py"
            )
        return self.codebook

    def _check_codebook(self, codebook: Codebook) -> None:
        if codebook.dim != self.dim:
            fitted_on = codebook.metadata.get("encoder", "not recorded")
            raise CodebookError(
                f"the codebook has {codebook.dim} channels, encoder {self.description['encoder']} gives "
                f"{self.dim}: use the encoder it was fitted on ({fitted_on})"
            )
        for key, found in self.metadata.items():
            recorded = codebook.metadata.get(key, found)
            # A weights file may be renamed or replace a tag; its digest says whether it is the same.
            if key != "weights" and recorded != found:
                raise CodebookError(
                    f"codebook {codebook.digest[:12]} was fitted with {key} {_short(recorded)} "
                    f"({codebook.metadata.get('encoder')}, {codebook.metadata.get('weights')}), "
                    f"this {type(self).__name__} has {_short(found)} "
                    f"({self.description['encoder']}, {self.description['weights']}): "
                    "use that encoder or fit a codebook for this one with tools/fit_codebook.py"
                )


def layer_output(encoder: nn.Module, images: Tensor, layer: int | str) -> Tensor:
    """What an encoder, or a submodule of it, makes of images.

    Raises:
        TokenizerError: the encoder has no such layer.
    """
    if isinstance(layer, str) and layer in dict(encoder.named_modules()):
        kept: list[Any] = []
        hook = encoder.get_submodule(layer).register_forward_hook(lambda *call: kept.append(call[-1]))
        try:
            encoder(images)
        finally:
            hook.remove()
        output = kept[-1] if kept else None  # None: it is not run
    else:
        output = _entry(encoder(images), layer)
    while isinstance(output, list | tuple) and output:
        output = output[0]  # with what else a layer returns: class token, attention
    if not isinstance(output, Tensor):
        raise TokenizerError(
            f"encoder {type(encoder).__name__} has no output for layer {layer!r}: give the index of one of "
            f"its outputs, or the name of a submodule that is run ({_names(encoder)})"
        )
    return output


def _entry(output: Any, layer: int | str) -> Any:
    if isinstance(output, Tensor):
        return output if layer in (0, -1) else None
    try:
        return output[layer]
    except (KeyError, IndexError, TypeError):
        return None


def _is_file(value: Any) -> bool:
    return isinstance(value, str) and os.path.isfile(value)  # which may be moved


def _names(encoder: nn.Module) -> str:
    """Some names of submodules, the outer ones first, from the last on."""
    names = sorted((name for name, _ in encoder.named_modules() if name), key=lambda name: name.count("."))
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) else str(value)
