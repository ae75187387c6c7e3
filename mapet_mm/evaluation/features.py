"""Features of an image set, in files, read in blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mapet_mm.evaluation.images import ImageSet
from mapet_mm.structures.parts import PENDING, SKIPPED, Part, Parts

BLOCK = 256  # images in a file: 0.8 MB of a layer of ViT-B, 77 MB of its patch tokens
TOKENS = "tokens"


class LayerParts(Parts):
    """Parts of an image set, which never grows: the last one has no room for more."""

    def empty(self, part: int) -> Part:
        """Rows that are all pending."""
        return Part.empty(len(self.part_range(part)), self.shape, self.dtype)


class Features:
    """Features of an image set in float16, in parts of 256 images: one `Parts` a layer, one of patch tokens.

    There are two kinds. "pooled" has class token and patch mean of a layer side by side, `(n, S D)` with
    S = 2, or S = 1 where a backbone has no class token or no patches. "tokens" has the last layer's patch
    tokens, `(n, N, D)`. Everything is given in float32.

    Attributes:
        labels: class of each image, or None.

    Args:
        folder: of one image set and one backbone.
        images: the set. Those that could not be decoded are left out of it, and have no features.
        layers: their names, "1", ..., "output".
        poolings: 'class token' and 'mean', or the one that there is.
        dim: width of a token, `D`.
        grid: (H, W) patches; (0, 0) if the features are vectors.
        identity: all that decides the features.
    """

    def __init__(
        self,
        folder: Path,
        images: ImageSet,
        layers: Sequence[str],
        poolings: Sequence[str],
        dim: int,
        grid: tuple[int, int],
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.images = images
        self.layers = list(layers)
        self.poolings = list(poolings)
        self.dim = dim
        self.grid = grid
        self.identity = identity
        shapes = {layer: (len(poolings) * dim,) for layer in layers}
        if grid != (0, 0):
            shapes[TOKENS] = (prod(grid), dim)
        self.parts: dict[str, Parts] = {}
        for name, shape in shapes.items():
            self.parts[name] = LayerParts(folder, name, "features", shape, np.float16, images.files, BLOCK)
        self.look()

    def look(self) -> None:
        """See what is in the files now. Images that could not be decoded are left out."""
        self.states = {name: parts.all_states() for name, parts in self.parts.items()}
        left_out = {}
        for name, states in self.states.items():
            skipped = np.flatnonzero(states == SKIPPED).tolist()
            reasons = self.parts[name].skipped if skipped else {}
            left_out.update({row: reasons[self.images.files[row]] for row in skipped})
        self.images.leave_out(left_out)
        self.labels = self.images.labels
        self.kept = np.isin(np.arange(len(self.images.files)), list(left_out), invert=True)
        sizes = np.add.reduceat(self.kept, np.arange(0, len(self.kept), BLOCK), dtype=np.int64)
        self.ends = torch.from_numpy(sizes).cumsum(0)  # of the blocks

    def names(self, kinds: Sequence[str | int]) -> list[str]:
        """The names in `parts` of some kinds: 'pooled', 'layers', 'tokens', or a number of last layers."""
        last = {"pooled": 1, "layers": len(self.layers), TOKENS: 0}
        count = max(last.get(kind, kind) for kind in kinds)
        names = []
        if count:
            names += self.layers[-count:]
        if TOKENS in kinds and TOKENS in self.parts:
            names.append(TOKENS)
        return names

    def missing(self, name: str) -> int:
        """How many images have no features of a layer, or no patch tokens, yet."""
        return int((self.states[name] == PENDING).sum())

    def missing_bytes(self, name: str) -> int:
        """Size on disk of what is missing of a layer, or of the patch tokens."""
        return self.missing(name) * prod(self.parts[name].shape) * self.parts[name].dtype.itemsize

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def settings(self) -> list[str]:
        """What classifiers are given: each pooling and, of two, 'both' side by side."""
        return [*self.poolings, "both"] if len(self.poolings) == 2 else self.poolings

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.ends)

    def rows(self, block: int) -> slice:
        """The images of a block."""
        start = int(self.ends[block - 1]) if block else 0
        return slice(start, int(self.ends[block]))

    def read(self, kind: str, block: int, layer: int = -1) -> Tensor:
        """A block in float16: `(b, S D)` of one layer, without reading the others, or `(b, N, D)`.

        Args:
            kind: 'pooled' | 'tokens'.
            block: its number.
            layer: its index in `layers`.
        """
        parts = self.parts[TOKENS if kind == TOKENS else self.layers[layer]]
        # Opened for this block alone: all layers' files of ImageNet are more than a process may open.
        values = parts.open(block).rows(parts.kind)
        kept = self.kept[block * BLOCK : (block + 1) * BLOCK]
        return torch.from_numpy(values if kept.all() else values[kept])

    def blocks(self, kind: str, layer: int = -1) -> Iterator[tuple[slice, Float[Tensor, ...]]]:
        """All blocks in order, with their images; see `read`."""
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
        found = torch.empty(len(images), columns.stop - columns.start)  # parts and their sum take twice that
        start = 0
        for block, rows in self._by_block(images):
            stop = start + len(rows)
            found[start:stop] = self.read("pooled", block, layer)[rows][:, columns]
            start = stop
        return found

    def tokens(self, images: Sequence[int]) -> Float[Tensor, "image row column dim"]:
        """The last layer's patch tokens of some images, in ascending order."""
        by_block = self._by_block(torch.tensor(images))
        found = [self.read(TOKENS, block)[rows].float() for block, rows in by_block]
        return torch.cat(found).unflatten(1, self.grid)

    def _by_block(self, images: Int64[Tensor, " image"]) -> Iterator[tuple[int, Int64[Tensor, " row"]]]:
        """Each block that has some of these images, once, with their rows in it."""
        blocks = torch.searchsorted(self.ends, images, right=True)
        blocks, counts = blocks.unique_consecutive(return_counts=True)
        for block, some in zip(blocks.tolist(), images.split(counts.tolist()), strict=True):
            yield block, some - self.rows(block).start
