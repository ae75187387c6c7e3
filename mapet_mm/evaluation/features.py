"""Features of an image set, in files or in memory, read in blocks."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import prod
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mapet_mm.utils.atomic_files import replace_file

BLOCK = 256  # images in a file: 10 MB of ViT-B's pooled features, 77 MB of its patch tokens
BYTES = 2  # of a number on disk, float16
# The kinds of features, and under which of them a file has each.
STORED_AS = {"pooled": ("pooled", "layers"), "layers": ("layers",), "tokens": ("tokens",)}


class Features:
    """Features of an image set. Subclasses say where they are: they have `read`.

    There are three kinds. "pooled" has class token and patch mean of the last layer side by side,
    `(1, n, S D)` with S = 2, or S = 1 where a backbone has no class token or no patches; "layers" has those
    of every layer, `(L, n, S D)`. "tokens" has the last layer's patch tokens, `(n, N, D)`. Everything is
    read as float32.

    Args:
        name: of the image set.
        layers: their names, "1", ..., "output".
        poolings: 'class token' and 'mean', or the one that there is.
        dim: width of a token, `D`.
        grid: (H, W) patches; (0, 0) if the features are vectors.
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
        self.name = name
        self.layers = list(layers)
        self.poolings = list(poolings)
        self.dim = dim
        self.grid = grid
        self.labels = labels
        self.size = size

    def __len__(self) -> int:
        return self.size

    @property
    def settings(self) -> list[str]:
        """What classifiers are given: each pooling and, of two, 'both' side by side."""
        if len(self.poolings) == 1:
            return self.poolings
        return [*self.poolings, "both"]

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return -(-self.size // BLOCK)

    def rows(self, block: int) -> slice:
        """The images of a block."""
        return slice(block * BLOCK, min(self.size, (block + 1) * BLOCK))

    def block_of(self, image: int) -> int:
        """The block of an image."""
        return image // BLOCK

    def read(self, kind: str, block: int, layer: int = -1) -> Tensor:
        """A block: `(b, S D)` of one layer, without reading the others, or `(b, N, D)`, as it is stored.

        Args:
            kind: 'pooled' | 'tokens'.
            block: its number.
            layer: its index in `layers`.
        """
        raise NotImplementedError

    def blocks(self, kind: str, layer: int = -1) -> Iterator[tuple[slice, Float[Tensor, ...]]]:
        """All blocks in order, with their images.

        Args:
            kind: 'pooled' gives `(b, S D)` of one layer, 'tokens' the patch tokens `(b, N, D)`.
            layer: its index in `layers`.
        """
        for block in range(self.num_blocks):
            yield self.rows(block), self.read(kind, block, layer).float()

    def columns(self, setting: str) -> slice:
        """Columns of a setting in "pooled"."""
        if setting == "both":
            return slice(0, 2 * self.dim)
        start = self.dim * self.poolings.index(setting)
        return slice(start, start + self.dim)

    def pooled(
        self, setting: str = "mean", layer: int = -1, images: Int64[Tensor, " row"] | None = None
    ) -> Float[Tensor, "row width"]:
        """Features `(n, D)` of one layer, `(n, 2 D)` of both poolings.

        Args:
            setting: 'class token', 'mean' or 'both'.
            layer: its index in `layers`.
            images: in ascending order; all by default.
        """
        if images is None:
            images = torch.arange(len(self))
        columns = self.columns(setting)
        found = torch.empty(len(images), columns.stop - columns.start)
        # Each block is read once, for all of its images together.
        blocks, counts = (images // BLOCK).unique_consecutive(return_counts=True)
        start = 0
        for block, count in zip(blocks.tolist(), counts.tolist(), strict=True):
            in_block = images[start : start + count] - block * BLOCK
            found[start : start + count] = self.read("pooled", block, layer)[in_block][:, columns]
            start += count
        return found

    def tokens(self, images: Sequence[int]) -> Float[Tensor, "image row column dim"]:
        """The last layer's patch tokens of some images."""
        found = []
        for block, some in groupby(images, key=lambda index: index // BLOCK):
            in_block = [index - block * BLOCK for index in some]
            found.append(self.read("tokens", block)[in_block].float())
        return torch.cat(found).unflatten(1, self.grid)


class FeatureBank(Features):
    """Features in float16 in files of 256 images each: `<folder>/layers/000012.npy`.

    Args:
        folder: of one image set and one backbone.
        **known: as for `Features`.
    """

    def __init__(self, folder: Path, **known) -> None:
        super().__init__(**known)
        self.folder = folder

    def path(self, kind: str, block: int) -> Path:
        """File of a block: of the kinds that hold these features the one that is there, or the first."""
        paths = [self.folder / name / f"{block:06d}.npy" for name in STORED_AS[kind]]
        return next(filter(Path.exists, paths), paths[0])

    def has(self, kinds: Sequence[str], block: int) -> bool:
        """True if the block's files of all kinds are there."""
        return all(self.path(kind, block).exists() for kind in kinds)

    def read(self, kind: str, block: int, layer: int = -1) -> Tensor:
        """A block's file, mapped."""
        if kind == "tokens":
            return self.stored(kind, block)
        if layer in (-1, len(self.layers) - 1):
            return self.stored("pooled", block)[-1]
        return self.stored("layers", block)[layer]

    def stored(self, kind: str, block: int) -> Tensor:
        """All of a block's file, mapped."""
        return torch.from_numpy(np.load(self.path(kind, block), mmap_mode="c"))

    def write(self, kind: str, block: int, values: Tensor) -> None:
        """Write a block, whole or not at all."""
        content = io.BytesIO()
        np.save(content, values.numpy())
        self.path(kind, block).parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path(kind, block), content.getvalue())

    def missing_bytes(self, kind: str) -> int:
        """Size on disk of the blocks that are not there yet."""
        numbers = {
            "pooled": len(self.poolings) * self.dim,
            "layers": len(self.layers) * len(self.poolings) * self.dim,
            "tokens": prod(self.grid) * self.dim,
        }
        num_images = 0
        for block in range(self.num_blocks):
            if not self.has([kind], block):
                rows = self.rows(block)
                num_images += rows.stop - rows.start
        return num_images * numbers[kind] * BYTES


class MemoryFeatures(Features):
    """Features in memory.

    Args:
        pooled: `(L, n, S D)`.
        tokens: `(n, N, D)`.
        poolings: as for `Features`.
        **known: `name`, `layers`, `grid` and `labels`, as for `Features`.
    """

    def __init__(
        self, pooled: Tensor, tokens: Tensor | None = None, *, poolings: Sequence[str], **known
    ) -> None:
        dim = pooled.shape[2] // len(poolings)
        super().__init__(poolings=poolings, dim=dim, size=pooled.shape[1], **known)
        self.values = {"pooled": pooled, "tokens": tokens}

    def read(self, kind: str, block: int, layer: int = -1) -> Tensor:
        """A block's part of the values."""
        values = self.values[kind]
        if kind == "pooled":
            values = values[layer]
        return values[self.rows(block)]
