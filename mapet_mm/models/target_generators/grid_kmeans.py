"""Tokens by k-means of any encoder's grid features (as k-CLIP's, paper Section 4.2)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from mapet_mm.models.target_generators.frozen_network import (
    OWN_WEIGHTS,
    build_frozen,
    split_checkpoint,
    weights_digest,
)
from mapet_mm.models.target_generators.tokenizer import Tokenizer, TokenizerError
from mapet_mm.registry import MODELS
from mapet_mm.structures.codebook import Codebook, CodebookError
from mapet_mm.utils.identity import canonical, digest, explain
from mapet_mm.utils.precision import PRECISIONS, computing_in, full_float32


@MODELS.register_module()
class GridKMeans(Tokenizer):
    """Target generator: for each of an encoder's grid features, the index of its nearest centroid.

    The encoder is any module that takes normalised images, of MMPretrain, timm (`TIMMBackbone`), Hugging Face
    (`HuggingFaceClassifier`, whose hidden states are its outputs), open_clip (`open_clip.create_model`) or
    this package. Its output is a square feature map (B, D, H, W), or a sequence of tokens (B, N, D) that ends
    with a square grid.

    A codebook may be used in another precision than its features were computed in, which its metadata name:
    a centroid is the mean of so many of them that their rounding hardly moves it. Tokens of two precisions
    never mix, because the precision is part of `digest`; 'float32' leaves no trace there.

    Args:
        encoder: its config, or the module itself; see `build_frozen` for its weights.
        image_size: side of the input images in pixels.
        codebook: path of the codebook (or a `Codebook`); None to compute features only.
        layer: which output to take: an index if the encoder returns several, a key if it returns a dict, or
            the name of a submodule (`"layers.7"`, `"timm_model.blocks.8"`).
        num_extra_tokens: tokens before the grid's (class token, registers); None: the number that
            MMPretrain's and timm's networks state, else 0.
        random_seed: draw fixed random weights from this seed if the config names no trained ones.
        precision: what the encoder computes in: 'float32', in which devices differ in ties alone, or 'tf32',
            'float16' or 'bfloat16', which GPUs compute many times as fast. Features come out in float32, and
            the nearest centroids are found in float32.

    Raises:
        TokenizerError: the encoder has no such layer, the layer has no square grid, the precision is
            unknown, or see `build_frozen`.
        CodebookError: the codebook cannot be read or was fitted on other features.

    Examples:
        >>> vit = dict(type="mapet_mm.MaPeTViT", arch="deit-tiny", img_size=32, out_type="featmap")
        >>> features = GridKMeans(vit, image_size=32, random_seed=0).features(torch.randn(8, 3, 32, 32))
        >>> features.shape  # a grid of 2 x 2
        torch.Size([8, 4, 192])
        >>> codebook = Codebook(features.flatten(0, 1))  # or of k centroids: `fit_codebook`
        >>> tokenizer = GridKMeans(vit, image_size=32, codebook=codebook, random_seed=0)
        >>> tokenizer(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        encoder: Mapping[str, Any] | nn.Module,
        image_size: int = 224,
        codebook: str | os.PathLike | Codebook | None = None,
        layer: int | str = -1,
        num_extra_tokens: int | None = None,
        random_seed: int | None = None,
        precision: str = "float32",
    ) -> None:
        if precision not in PRECISIONS:
            raise TokenizerError(f"`precision` is {precision!r}: one of {', '.join(PRECISIONS)}")
        if codebook is not None and not isinstance(codebook, Codebook):
            codebook = Codebook.load(codebook)  # before the minutes of a weights download
        if isinstance(encoder, nn.Module):
            network = encoder
            weights = "given"
        else:
            network, weights = build_frozen(encoder, random_seed)
        super().__init__(network, image_size)
        self.codebook = codebook
        self.layer = layer
        self.precision = precision
        self.num_extra_tokens = extra_tokens_of(network) if num_extra_tokens is None else num_extra_tokens
        side, self.dim = self._measure()
        self.grid = (side, side)
        # Description of the encoder, for the metadata of a codebook fitted on these features.
        self.metadata = {
            **self._describe(encoder, weights),
            "encoder_digest": weights_digest(network),
            "image_size": image_size,
        }
        if precision != "float32":  # which older codebooks and features do not name
            self.metadata["precision"] = precision
        if codebook is not None:
            self._require_same_encoder(codebook)

    def _require_same_encoder(self, codebook: Codebook) -> None:
        """Raise CodebookError if the codebook records another encoder than this one, in any precision."""
        recorded = codebook.metadata
        now = {key: value for key, value in self.identity.items() if key in recorded and key != "precision"}
        difference = explain({key: recorded[key] for key in now}, now)
        if difference:
            raise CodebookError(
                f"codebook {codebook.digest[:12]} was fitted on another encoder ({difference}; weights "
                f"{recorded.get('weights')}, now {self.metadata['weights']}): use that one, or fit another "
                "codebook with `mapet-mm fit-codebook`"
            )

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides the features: the metadata, but for the weights' name: their digest counts."""
        return {key: value for key, value in self.metadata.items() if key != "weights"}

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._fitted().k

    @property
    def digest(self) -> str:
        """Identity: the codebook's in this precision if it records its encoder, else a digest of both."""
        codebook = self._fitted()
        if "encoder_digest" in codebook.metadata:  # and it is this one
            return codebook.digest_at(self.precision)
        return digest([codebook.digest, self.identity])

    @torch.no_grad()
    def features(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch grid dim"]:
        """Grid features (B, HW, D) in float32 of normalised images (B, 3, H, W)."""
        encoder = self.network_for(images)
        with computing_in(self.precision, images.device):
            output = layer_output(encoder, images.float(), self.layer).float()
        if len(output) == len(images):  # not a batch of windows
            # A square map.
            if output.ndim == 4 and output.shape[2] == output.shape[3]:
                return output.flatten(2).transpose(1, 2)  # B D H W -> B (H W) D
            # A sequence that ends with a square grid.
            num_positions = output.shape[1] - self.num_extra_tokens
            if output.ndim == 3 and num_positions > 0 and math.isqrt(num_positions) ** 2 == num_positions:
                return output[:, self.num_extra_tokens :]
        raise TokenizerError(
            f"layer {self.layer!r} of {type(encoder).__name__} gives {tuple(output.shape)} for {len(images)} "
            f"images, no square map (B, D, H, W) nor {self.num_extra_tokens} extra tokens and a square of "
            "others (B, N, D): set `layer` or `num_extra_tokens`"
        )

    @torch.no_grad()
    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Int64[Tensor, "batch grid"]:
        """Token ids (B, HW), int64, in raster order, of normalised images (B, 3, H, W)."""
        codebook = self._fitted()
        features = self.features(images)
        with full_float32(images.device):
            return codebook.assign(features)

    def _fitted(self) -> Codebook:
        if self.codebook is None:
            raise CodebookError(
                f"{type(self).__name__} has no codebook: set `codebook`, fitted with `mapet-mm fit-codebook`"
            )
        return self.codebook

    def _describe(self, encoder: Mapping[str, Any] | nn.Module, weights: str) -> dict[str, Any]:
        """Encoder, weights and layer in words that stay the same when files move."""
        words = type(encoder).__name__
        if isinstance(encoder, Mapping):
            config = canonical(split_checkpoint(encoder)[0])
            words = config.pop("type")
            for option in OWN_WEIGHTS:  # files may move
                if os.path.isfile(str(config.get(option))):
                    config[option] = "a file"
            words += f"({', '.join(f'{name}={value!r}' for name, value in sorted(config.items()))})"
        where = {"layer": self.layer, "num_extra_tokens": self.num_extra_tokens}
        return {"encoder": words, "weights": weights, **where}

    def _measure(self) -> tuple[int, int]:
        """Side of the grid and number of channels, from the features of black images."""
        # Two images, because a batch of windows must not look like one image.
        images = torch.zeros(2, 3, self.image_size, self.image_size)
        features = self.features(images)
        return math.isqrt(features.shape[1]), features.shape[2]


def extra_tokens_of(network: nn.Module) -> int:
    """Tokens before the grid's: the number that MMPretrain's and timm's networks state, else 0."""
    stated = getattr(network, "num_extra_tokens", None)
    if stated:
        return stated
    return getattr(getattr(network, "timm_model", network), "num_prefix_tokens", 0)


def layer_output(encoder: nn.Module, images: Tensor, layer: int | str) -> Tensor:
    """Output of an encoder, or of a submodule of it, for images."""
    if isinstance(layer, str) and layer in dict(encoder.named_modules()):
        kept: list[Any] = []
        with encoder.get_submodule(layer).register_forward_hook(lambda *call: kept.append(call[-1])):
            encoder(images)
        output = kept[-1] if kept else None
    else:
        if type(encoder).__name__ == "HuggingFaceClassifier":
            output = encoder.model(images, output_hidden_states=True).hidden_states
        else:
            output = encoder(images)
        outputs = (output,) if isinstance(output, Tensor) else output
        try:
            output = outputs[layer]
        except (KeyError, IndexError, TypeError):
            output = None
    while isinstance(output, list | tuple) and output:
        output = output[0]  # beside class token or attention
    if not isinstance(output, Tensor):
        raise TokenizerError(
            f"encoder {type(encoder).__name__} has no output for layer {layer!r}: give the index of one of "
            "its outputs, or the name of a submodule"
        )
    return output
