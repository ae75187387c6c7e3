"""Features of a set of images by one backbone, in blocks: in files, or in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from safetensors import safe_open
from torch import Tensor

from mapet_mm.utils.errors import UserError

# Images of one block: 10 MB of ViT-B's pooled features, 77 MB of its patch tokens.
BLOCK = 256
KINDS = ("pooled", "tokens")
POOLINGS = ("class token", "mean", "both")


class Features:
    """What is known of each image of a set, read a block at a time.

    Two kinds: "pooled", of every layer the class token and the patch tokens' mean, `(2, L, b, D)`, or one of
    the two, `(1, L, b, D)`, where a backbone has no class token or no patches; and "tokens", the last layer's
    patch tokens, `(b, N, D)`. Where a backbone has a final norm, the last layer, "output", is the normed one.

    Args:
        name: of the image set.
        layers: their names in order, "1", ..., "output".
        poolings: what there is of 'class token' and 'mean', in this order.
        dim: width of a token, `D`.
        grid: (H, W) patches.
        labels: class of each image, or None.
        size: number of images.
    """

    def __init__(
        self,
        name: str,
        layers: Sequence[str],
        poolings: Sequence[str],
        dim: int,
        grid: tuple[int, int],
        labels: Int64[Tensor, " image"] | None,
        size: int,
    ) -> None:
        self.name, self.layers, self.dim, self.grid = name, list(layers), dim, tuple(grid)
        self._stored, self.labels, self.size = list(poolings), labels, size

    def __len__(self) -> int:
        return self.size

    @property
    def poolings(self) -> list[str]:
        """What `pooled` can give: 'class token', 'mean' and, of these two, 'both'."""
        return [*self._stored, *(["both"] if len(self._stored) == 2 else [])]

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return -(-self.size // BLOCK)

    def rows(self, block: int) -> slice:
        """The images of a block."""
        return slice(block * BLOCK, min(self.size, (block + 1) * BLOCK))

    def read(self, kind: str, block: int, layer: int | None = None) -> Tensor:
        """A block of a kind, as it is stored; of "pooled" one layer if it is named, `(2, b, D)`."""
        raise NotImplementedError

    def blocks(self, kind: str, layer: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """All blocks of a kind in order, with their images, in float32."""
        layer = None if layer is None else layer % len(self.layers)
        for block in range(self.num_blocks):
            yield self.rows(block), self.read(kind, block, layer).float()

    def pooled(
        self, pooling: str = "mean", layer: int = -1, images: Int64[Tensor, " row"] | None = None
    ) -> Float[Tensor, "row dim"]:
        """Features `(n, D)` of one layer, `(n, 2 D)` of both poolings, in float32.

        Args:
            pooling: 'class token', 'mean' or 'both'.
            layer: its place in `layers`.
            images: which, in ascending order; all by default.
        """
        layer %= len(self.layers)
        width = self.dim * (2 if pooling == "both" else 1)
        images = torch.arange(len(self)) if images is None else images
        found = torch.empty(len(images), width)
        for block in (images // BLOCK).unique().tolist():
            mine = images // BLOCK == block
            values = self.read("pooled", block, layer)[:, images[mine] - block * BLOCK]
            found[mine] = self.pool(values.float(), pooling)
        return found

    def pool(self, values: Float[Tensor, "pooling *rest dim"], pooling: str) -> Float[Tensor, "*rest width"]:
        """One pooling, or both side by side, of what is stored."""
        return torch.cat(list(values), dim=-1) if pooling == "both" else values[self._stored.index(pooling)]


class MemoryFeatures(Features):
    """Features that are held here.

    Args:
        pooled: `(2, L, n, D)` or `(1, L, n, D)`.
        tokens: `(n, N, D)`.
        **known: the arguments of `Features` but for `size` and `dim`.
    """

    def __init__(self, pooled: Tensor, tokens: Tensor | None = None, **known: Any) -> None:
        super().__init__(dim=pooled.shape[-1], size=pooled.shape[2], **known)
        self._values = pooled, tokens

    def read(self, kind: str, block: int, layer: int | None = None) -> Tensor:
        pooled, tokens = self._values
        if kind == "tokens":
            return tokens[self.rows(block)]
        return (pooled if layer is None else pooled[:, layer])[..., self.rows(block), :]


class CachedFeatures(Features):
    """Features in a folder: `pooled/<block>.safetensors`, `tokens/<block>.safetensors`.

    A block is in float16 or, where that does not tell its images apart, in float32.

    Args:
        folder: of one image set and one backbone.
        **known: the arguments of `Features`.
    """

    def __init__(self, folder: Path, **known: Any) -> None:
        super().__init__(**known)
        self.folder = folder

    def path(self, kind: str, block: int) -> Path:
        """File of a block."""
        return self.folder / kind / f"{block:06d}.safetensors"

    def missing(self, kinds: Sequence[str]) -> list[int]:
        """Blocks of which a kind is not there."""
        blocks = range(self.num_blocks)
        return [block for block in blocks if not all(self.path(kind, block).exists() for kind in kinds)]

    def read(self, kind: str, block: int, layer: int | None = None) -> Tensor:
        path = self.path(kind, block)
        try:
            # Opened for each read: pages of a map count as this process's memory until it is closed.
            with safe_open(path, "pt") as file:
                values = file.get_slice(kind)
                return values[:] if layer is None else values[:, layer]
        except Exception as error:  # what a broken file raises depends on where it is broken
            raise UserError(
                f"{path} is damaged or gone ({error}): remove it and run the same command again"
            ) from error


def bytes_per_image(kind: str, features: Features) -> int:
    """Size of an image's features on disk, in float16; those in float32 are twice as large."""
    height, width = features.grid
    numbers = len(features._stored) * len(features.layers) if kind == "pooled" else height * width
    return 2 * numbers * features.dim
