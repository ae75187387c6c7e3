"""k-CLIP: visual tokens as nearest centroids of CLIP ResNet grid features (paper Section 3.3)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from mapet_mm.registry import MODELS
from mapet_mm.tokenizers.base import Tokenizer, full_float32
from mapet_mm.tokenizers.clip_tower import build_tower, describe, tower_config, weights_digest
from mapet_mm.tokenizers.codebook.codebook import Codebook, CodebookError

# Stem (two strides), then three stages with a stride each.
STRIDE = 32


def grid_features(
    visual: nn.Module, images: Float[Tensor, "batch 3 height width"]
) -> Float[Tensor, "batch grid dim"]:
    """Output of a CLIP ResNet tower's last residual stage, after its ReLU and before attention pooling.

    Args:
        visual: open_clip's `ModifiedResNet`.
        images: (B, 3, H, W), normalised with CLIP's mean and standard deviation.

    Returns:
        (B, H/32 * W/32, D), positions in raster order.
    """
    features = visual.stem(images)
    for stage in (visual.layer1, visual.layer2, visual.layer3, visual.layer4):
        features = stage(features)
    return features.flatten(2).transpose(1, 2)  # B D H W -> B (H W) D


@MODELS.register_module()
class KCLIP(Tokenizer):
    """Target generator: the grid of CLIP features of an image, as indices of their nearest centroids.

    Args:
        clip_model: a CLIP ResNet of open_clip, or `dict(layers, width, image_size)` for a small one.
        pretrained: a weights tag of open_clip, a local weights file, or `dict(type="random", seed=0)`.
        codebook: path of the codebook (or a `Codebook`); None to compute features only.
        image_size: side of the input images in pixels, if not the architecture's own.

    Raises:
        TowerError: the tower's weights cannot be had or do not fit.
        CodebookError: the codebook cannot be read or was fitted on another encoder.
    """

    def __init__(
        self,
        clip_model: str | Mapping[str, Any] = "RN50x64",
        pretrained: str | Mapping[str, Any] = "openai",
        codebook: str | os.PathLike | Codebook | None = None,
        image_size: int | None = None,
        init_cfg: dict | None = None,
    ) -> None:
        # Read first: a wrong path should not cost the minutes of a weights download.
        if codebook is not None and not isinstance(codebook, Codebook):
            codebook = Codebook.load(codebook)
        image_size = image_size or tower_config(clip_model)["image_size"]
        if image_size % STRIDE:
            raise ValueError(f"KCLIP's image_size must be a multiple of {STRIDE} px, got {image_size}")
        super().__init__(build_tower(clip_model, pretrained), image_size, init_cfg)
        self.codebook = codebook
        self.description = describe(clip_model, pretrained)
        self.encoder_digest = weights_digest(self.visual)
        if codebook is not None:
            self._check_codebook(codebook)

    @property
    def visual(self) -> nn.Module:
        """The CLIP ResNet tower, without attention pooling."""
        return self._network[0]

    @property
    def dim(self) -> int:
        """Feature channels (4096 for RN50x64)."""
        return self.visual.layer4[-1].conv3.out_channels

    @property
    def grid(self) -> tuple[int, int]:
        """(H, W) tokens of an image of `image_size`."""
        return self.image_size // STRIDE, self.image_size // STRIDE

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._need_codebook().k

    @property
    def digest(self) -> str:
        """Identity of this tokenizer: its codebook's digest."""
        return self._need_codebook().digest

    @property
    def metadata(self) -> dict[str, Any]:
        """What a codebook fitted on these features records of the encoder."""
        return {**self.description, "encoder_digest": self.encoder_digest, "image_size": self.image_size}

    @torch.no_grad()
    def features(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch grid dim"]:
        """Grid features (B, HW, D) in float32 of normalised images (B, 3, H, W)."""
        self.check_size(images)
        with full_float32(images.device):
            return grid_features(self.visual, images.float())

    @torch.no_grad()
    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Int64[Tensor, "batch grid"]:
        """Token ids (B, HW), int64, in raster order, of normalised images (B, 3, H, W)."""
        codebook = self._need_codebook()
        features = self.features(images)
        with full_float32(images.device):
            return codebook.assign(features)

    def _need_codebook(self) -> Codebook:
        if self.codebook is None:
            raise CodebookError(
                "KCLIP has no codebook: give `codebook=<path>`, fitted with tools/fit_codebook.py"
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
                    f"this KCLIP has {_short(found)} "
                    f"({self.description['encoder']}, {self.description['weights']}): "
                    "use that encoder or fit a codebook for this one with tools/fit_codebook.py"
                )


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) else str(value)
