"""Photographs as other sensors would have taken them."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
from mmcv.transforms import BaseTransform

from mapet_mm.registry import TRANSFORMS

LEVELS = 16
# Each of five bands: its shares of red, green and blue.
FIVE = np.array(
    [[0.6, 0.4, 0.0], [0.0, 0.6, 0.4], [0.4, 0.0, 0.6], [1.2, -0.4, 0.2], [-0.4, 0.4, 1.0]], np.float32
)


@TRANSFORMS.register_module()
class Sensor(BaseTransform):
    """Replace a photograph's colors by a sensor's bands; one band stands three times.

    Args:
        kind: "band", the brightness; "inverted", its inverse in 16 levels; "five", five mixed bands.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        """Change `img`, which is blue, green, red."""
        image = results["img"]
        if self.kind == "five":
            bands = image[..., ::-1].astype(np.float32) @ FIVE.T
            results["img"] = bands.round().clip(0, 255).astype(np.uint8)
            return results
        band = cv2.cvtColor(image, cv2.COLOR_BGR2GRAY)
        if self.kind == "inverted":
            width = 256 // LEVELS
            band = (255 - band) // width * np.uint8(255 // (LEVELS - 1))
        results["img"] = np.repeat(band[..., None], 3, axis=2)
        return results


@TRANSFORMS.register_module()
class FirstBands(BaseTransform):
    """Keep the first three bands, which a tokenizer takes for red, green and blue."""

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        """Change `img`; images are blue, green, red until they are normalised."""
        results["img"] = np.ascontiguousarray(results["img"][..., 2::-1])
        return results
