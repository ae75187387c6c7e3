"""Tokens by k-means of any encoder's grid features (as k-CLIP's, paper Section 3.3)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from mapet_mm.models.target_generators.base import Tokenizer, TokenizerError, device_of, full_float32
from mapet_mm.models.target_generators.frozen_network import build_frozen, split_checkpoint, weights_digest
from mapet_mm.registry import MODELS
from mapet_mm.structures.codebook import Codebook, CodebookError
from mapet_mm.utils.config import type_name
from mapet_mm.utils.identity import canonical, digest


@MODELS.register_module()
class GridKMeans(Tokenizer):
    """Target generator: for each of an encoder's grid features, the index of its nearest centroid.

    The encoder is any module that takes normalised images: a backbone or a whole model of MMPretrain, of timm
    (`TIMMBackbone`), Hugging Face (`HuggingFaceClassifier`, whose hidden states are its outputs) or open_clip
    (`mapet_mm.OpenCLIPVisual`), or this package's `mapet_mm.MaPeTViT` with a pre-training's checkpoint. Its
    output is a sequence of tokens (B, N, D), the last of which are a square grid, or a square feature map
    (B, D, H, W).

    Args:
        encoder: its config, or the module itself; see `build_frozen` for its weights.
        image_size: side of the input images in pixels.
        codebook: path of the codebook (or a `Codebook`); None to compute features only.
        layer: which output to take: an index if the encoder returns several, a key if it returns a dict, or
            the name of a submodule (`"layers.7"`, `"timm_model.blocks.8"`).
        num_extra_tokens: tokens before the grid's (class token, registers); None: the number that
            MMPretrain's and timm's networks state, else 0.
        random_seed: draw fixed random weights from this seed if the config names no trained ones.

    Raises:
        TokenizerError: the encoder has no such layer, the layer has no square grid, or see `build_frozen`.
        CodebookError: the codebook cannot be read or was fitted on other features.
    """

    def __init__(
        self,
        encoder: Mapping[str, Any] | nn.Module,
        image_size: int = 224,
        codebook: str | os.PathLike | Codebook | None = None,
        layer: int | str = -1,
        num_extra_tokens: int | None = None,
        random_seed: int | None = None,
        init_cfg: dict | None = None,
    ) -> None:
        # Looked at first: a wrong option should not cost the minutes of a weights download.
        if codebook is not None and not isinstance(codebook, Codebook):
            codebook = Codebook.load(codebook)
        network, weights = encoder, "given"
        if not isinstance(encoder, nn.Module):
            network, weights = build_frozen("encoder", encoder, random_seed)
        super().__init__(network, image_size, init_cfg)
        self.layer, self.codebook = layer, codebook
        self.num_extra_tokens = _extra_tokens(network) if num_extra_tokens is None else num_extra_tokens
        self.description = self._describe(encoder, weights)
        self.encoder_digest = weights_digest(network)
        side, self.dim = self._measure()
        self.grid = side, side
        if codebook is not None:
            self._check_codebook(codebook)

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
        return digest([codebook.digest, {k: v for k, v in self.metadata.items() if k != "weights"}])

    @property
    def metadata(self) -> dict[str, Any]:
        """Description of the encoder for the metadata of a codebook fitted on these features."""
        return {
            **self.description,
            "encoder_digest": self.encoder_digest,
            "image_size": self.image_size,
        }

    @torch.no_grad()
    def features(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch grid dim"]:
        """Grid features (B, HW, D) in float32 of normalised images (B, 3, H, W)."""
        encoder = self.network_for(images)
        with full_float32(images.device):
            output = layer_output(encoder, images.float(), self.layer)
        if len(output) == len(images):  # not a batch of windows
            if output.ndim == 4 and output.shape[2] == output.shape[3]:
                return output.flatten(2).transpose(1, 2)  # B D H W -> B (H W) D
            count = output.shape[1] - self.num_extra_tokens
            if output.ndim == 3 and count > 0 and math.isqrt(count) ** 2 == count:
                return output[:, self.num_extra_tokens :]
        raise TokenizerError(
            f"layer {self.layer!r} of {type(encoder).__name__} gives {tuple(output.shape)} for {len(images)} "
            f"images, no square map (B, D, H, W) nor {self.num_extra_tokens} extra tokens and a square of "
            "others (B, N, D): set `layer` or `num_extra_tokens`"
        )

    @torch.no_grad()
    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Int64[Tensor, "batch grid"]:
        """Token ids (B, HW), int64, in raster order, of normalised images (B, 3, H, W)."""
        codebook = self._need_codebook()
        features = self.features(images)
        with full_float32(images.device):
            return codebook.assign(features)

    def _describe(self, encoder: Mapping[str, Any] | nn.Module, weights: str) -> dict[str, Any]:
        """Encoder and weights in words, and the layer, for a codebook's metadata."""
        words = type(encoder).__name__ if isinstance(encoder, nn.Module) else _words(encoder)
        where = {"layer": self.layer, "num_extra_tokens": self.num_extra_tokens}
        return {"encoder": words, "weights": weights, **where}

    def _measure(self) -> tuple[int, int]:
        """Side of the grid and number of channels, from the features of a black image."""
        side = self.image_size
        # two images, because a batch of windows must not look like one image
        features = self.features(torch.zeros(2, 3, side, side, device=device_of(self.network)))
        return math.isqrt(features.shape[1]), features.shape[2]

    def _need_codebook(self) -> Codebook:
        if self.codebook is None:
            raise CodebookError(
                f"{type(self).__name__} has no codebook: give `codebook=<path>`, fitted with "
                "tools/fit_codebook.py"
            )
        return self.codebook

    def _check_codebook(self, codebook: Codebook) -> None:
        for key, found in self.metadata.items():
            recorded = codebook.metadata.get(key, found)
            # A weights file may be renamed or replace a tag; its digest says whether it is the same.
            if key != "weights" and recorded != found:
                raise CodebookError(
                    f"codebook {codebook.digest[:12]} was fitted with {key} {recorded!s:.64} "
                    f"(weights {codebook.metadata.get('weights')}), this {type(self).__name__} has "
                    f"{found!s:.64} (weights {self.description['weights']}): use that encoder or fit a "
                    "codebook for this one with tools/fit_codebook.py"
                )


def layer_output(encoder: nn.Module, images: Tensor, layer: int | str) -> Tensor:
    """Output of an encoder, or of a submodule of it, for images.

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
        output = kept[-1] if kept else None
    else:
        if type(encoder).__name__ == "HuggingFaceClassifier":
            output = encoder.model(images, output_hidden_states=True).hidden_states
        else:
            output = encoder(images)
        try:
            output = ((output,) if isinstance(output, Tensor) else output)[layer]
        except (KeyError, IndexError, TypeError):
            output = None
    while isinstance(output, list | tuple) and output:
        output = output[0]  # beside class token or attention
    if not isinstance(output, Tensor):
        names = ", ".join(name for name, _ in encoder.named_children())
        raise TokenizerError(
            f"encoder {type(encoder).__name__} has no output for layer {layer!r}: give the index of one of "
            f"its outputs, or the name of a submodule ({names}, or one inside them)"
        )
    return output


def _extra_tokens(encoder: nn.Module) -> int:
    """The number of tokens before the grid's that a network of MMPretrain or timm states; else 0."""
    stated = getattr(encoder, "num_extra_tokens", None)
    return stated or getattr(getattr(encoder, "timm_model", encoder), "num_prefix_tokens", 0)


def _words(encoder: Mapping[str, Any]) -> str:
    """An encoder's config as words that stay the same when its files move."""
    config = canonical(split_checkpoint(encoder)[0])
    kind = type_name(config.pop("type"))
    files = (value if not os.path.isfile(str(value)) else "a file" for _, value in sorted(config.items()))
    return (
        f"{kind}({', '.join(f'{key}={value!r}' for key, value in zip(sorted(config), files, strict=True))})"
    )
