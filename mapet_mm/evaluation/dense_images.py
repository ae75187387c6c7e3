"""Images as the dense protocols take them: patch tokens, and labels at each image's own size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mapet_mm.evaluation.patch_labels import check_labels

# Numbers of features in a block.
BLOCK = 2**24


@dataclass(frozen=True, eq=False)
class DenseImages:
    """Images as patch tokens, with their labels.

    Args:
        tokens: patch tokens `(images, H, W, D)`: an array, or whatever has a length and gives `(n, H, W, D)`
            for a slice, such as features cached on disk.
        labels: of each image `(h, w)` at its own size, class indices and 255, ignored.
        names: of the images, for errors.
        side: pixels per side of a patch: so many labels a side a training patch has.
    """

    tokens: Any
    labels: Sequence[Int[np.ndarray, "height width"]]
    names: Sequence[str] = ()
    side: int = 1

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.labels):
            raise ValueError(f"{len(self.tokens)} images have tokens, {len(self.labels)} have labels")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def grid(self) -> tuple[int, int]:
        """Patches by rows and columns."""
        return tuple(self.tokens[:1].shape[1:3])

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return self.grid[0] * self.grid[1]

    @property
    def dim(self) -> int:
        """Width of the tokens."""
        return self.tokens[:1].shape[3]

    def checked_labels(self, index: int, num_classes: int) -> Int[np.ndarray, "height width"]:
        """An image's labels, of classes that there are."""
        labels = np.asarray(self.labels[index])
        check_labels(labels, num_classes, self.names[index] if len(self.names) else f"image {index}")
        return labels

    def blocks(self) -> Iterator[tuple[int, Float[Tensor, "patch dim"]]]:
        """The tokens as float32 rows, some images at a time, each with its first image's index."""
        images = max(1, BLOCK // (self.num_patches * self.dim))
        for start in range(0, len(self), images):
            yield start, torch.as_tensor(self.tokens[start : start + images]).flatten(0, -2).float()
