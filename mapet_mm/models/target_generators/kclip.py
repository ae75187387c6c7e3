"""k-CLIP: visual tokens as nearest centroids of CLIP ResNet grid features (paper Section 3.3)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from mapet_mm.models.target_generators.clip_tower import STRIDE, build_tower, tower_config
from mapet_mm.models.target_generators.grid_kmeans import GridKMeans
from mapet_mm.registry import MODELS
from mapet_mm.structures.codebook import Codebook


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
class KCLIP(GridKMeans):
    """Target generator: the nearest centroid's index for each feature of an image's CLIP grid.

    Args:
        clip_model: a CLIP ResNet of open_clip, or `dict(layers, width, image_size)` for a small one.
        pretrained: a weights tag of open_clip, a local weights file, or `dict(type="random", seed=0)`.
        codebook: path of the codebook (or a `Codebook`); None to compute features only.
        image_size: side of the input images in pixels, if not the architecture's own.
        stride: pixels from one grid position to the next: 32, or 16, 8 or 4 for a finer grid.

    Raises:
        TokenizerError: the tower's weights cannot be found or do not fit, or the stride is not supported.
        CodebookError: the codebook cannot be read or was fitted on another encoder.
    """

    def __init__(
        self,
        clip_model: str | Mapping[str, Any] = "RN50x64",
        pretrained: str | Mapping[str, Any] = "openai",
        codebook: str | os.PathLike | Codebook | None = None,
        image_size: int | None = None,
        stride: int = STRIDE,
    ) -> None:
        image_size = image_size or tower_config(clip_model)["image_size"]
        if image_size % stride:
            raise ValueError(f"KCLIP's image_size must be a multiple of {stride} px, got {image_size}")
        self.stride, self._tower = stride, (clip_model, pretrained)
        super().__init__(build_tower(clip_model, pretrained, stride), image_size, codebook)

    def _describe(self, *_: Any) -> dict[str, Any]:
        encoder, weights = self._tower
        if isinstance(encoder, Mapping):
            encoder = f"ModifiedResNet-{'-'.join(map(str, encoder['layers']))}-width{encoder['width']}"
        if self.stride != STRIDE:
            encoder += f" with stride {self.stride}"
        is_random = isinstance(weights, Mapping)
        words = f"random, seed {weights.get('seed', 0)}" if is_random else os.path.basename(weights)
        return {"encoder": encoder, "weights": words}

    def _measure(self) -> tuple[int, int]:
        # not by a pass through the tower, which takes seconds
        return self.image_size // self.stride, self.network.layer4[-1].conv3.out_channels
