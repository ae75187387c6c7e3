"""The feature bank: a backbone's features of an image set, computed once into files and read in blocks."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from mapet_mm.evaluation.image_sets import ImageSet, ImageSetError
from mapet_mm.evaluation.models import Checkpoint
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.dist import is_first_process, print_once
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.identity import digest, require_settings
from mapet_mm.utils.shared_work import my_blocks

BLOCK = 256  # images in a file: 10 MB of ViT-B's pooled features, 77 MB of its patch tokens
DRAWS = 8  # of the first image: a pipeline that flips half of the images is found with probability 0.99


@dataclass(eq=False)
class FeatureBank:
    """Features of an image set, in files of 256 images each: `<folder>/pooled/000012.npy`.

    There are two kinds. "pooled" has class token and patch mean of every layer side by side, `(L, b, S D)`
    with S = 2, or S = 1 where a backbone has no class token or no patches. "tokens" has the last layer's
    patch tokens, `(b, N, D)`. Files hold float16; everything is read as float32.

    Args:
        folder: of one image set and one backbone; None if the features are in memory.
        name: of the image set.
        layers: their names, "1", ..., "output".
        poolings: 'class token' and 'mean', or the one that there is; 'both' joins them.
        dim: width of a token, `D`.
        grid: (H, W) patches; (0, 0) if the features are vectors.
        labels: class of each image, or None.
        size: number of images.
    """

    folder: Path | None
    name: str
    layers: list[str]
    poolings: list[str]
    dim: int
    grid: tuple[int, int]
    labels: Int64[Tensor, " image"] | None
    size: int

    def __post_init__(self) -> None:
        if len(self.poolings) == 2:
            self.poolings = [*self.poolings, "both"]

    def __len__(self) -> int:
        return self.size

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return -(-self.size // BLOCK)

    def rows(self, block: int) -> slice:
        """The images of a block."""
        return slice(block * BLOCK, min(self.size, (block + 1) * BLOCK))

    def path(self, kind: str, block: int) -> Path:
        """File of a block."""
        return self.folder / kind / f"{block:06d}.npy"

    def has(self, kinds: Sequence[str], block: int) -> bool:
        """True if the block's files of all kinds are there."""
        return all(self.path(kind, block).exists() for kind in kinds)

    def read(self, kind: str, block: int, layer: int = -1) -> Tensor:
        """A block as it is stored: `(b, S D)` of one layer, without reading the others, or `(b, N, D)`."""
        values = torch.from_numpy(np.load(self.path(kind, block), mmap_mode="c"))
        return values[layer] if kind == "pooled" else values

    def write(self, kind: str, block: int, values: Tensor) -> None:
        """Write a block, whole or not at all."""
        content = io.BytesIO()
        np.save(content, values.numpy())
        self.path(kind, block).parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path(kind, block), content.getvalue())

    def blocks(self, kind: str, layer: int = -1) -> Iterator[tuple[slice, Float[Tensor, ...]]]:
        """All blocks in order, with their images.

        Args:
            kind: 'pooled' gives `(b, S D)` of one layer, 'tokens' the patch tokens `(b, N, D)`.
            layer: its place in `layers`.
        """
        for block in range(self.num_blocks):
            yield self.rows(block), self.read(kind, block, layer).float()

    def columns(self, pooling: str) -> slice:
        """Columns of a pooling in "pooled"."""
        if pooling == "both":
            return slice(0, 2 * self.dim)
        start = self.dim * self.poolings.index(pooling)
        return slice(start, start + self.dim)

    def pooled(
        self, pooling: str = "mean", layer: int = -1, images: Int64[Tensor, " row"] | None = None
    ) -> Float[Tensor, "row width"]:
        """Features `(n, D)` of one layer, `(n, 2 D)` of both poolings.

        Args:
            pooling: 'class token', 'mean' or 'both'.
            layer: its place in `layers`.
            images: in ascending order; all by default.
        """
        images = torch.arange(len(self)) if images is None else images
        columns = self.columns(pooling)
        found = torch.empty(len(images), columns.stop - columns.start)
        blocks, counts = (images // BLOCK).unique_consecutive(return_counts=True)
        parts = (rows.split(counts.tolist()) for rows in (images, found))
        for block, here, target in zip(blocks.tolist(), *parts, strict=True):
            target[:] = self.read("pooled", block, layer)[here - block * BLOCK][:, columns]
        return found

    def tokens(self, images: Sequence[int]) -> Float[Tensor, "image row column dim"]:
        """The last layer's patch tokens of some images."""
        found = [
            self.read("tokens", block)[[index - block * BLOCK for index in some]].float()
            for block, some in groupby(images, key=lambda index: index // BLOCK)
        ]
        return torch.cat(found).unflatten(1, self.grid)


class MemoryFeatures(FeatureBank):
    """Features in memory.

    Args:
        pooled: `(L, n, S D)`.
        tokens: `(n, N, D)`.
        poolings: as for `FeatureBank`.
        **known: `name`, `layers`, `grid` and `labels`, as for `FeatureBank`.
    """

    def __init__(
        self, pooled: Tensor, tokens: Tensor | None = None, *, poolings: Sequence[str], **known: Any
    ) -> None:
        dim, size = pooled.shape[2] // len(poolings), pooled.shape[1]
        super().__init__(None, poolings=poolings, dim=dim, size=size, **known)
        self.values = {"pooled": pooled, "tokens": tokens}

    def read(self, kind: str, block: int, layer: int = -1) -> Tensor:
        """A block's part of the values."""
        values = self.values[kind]
        return (values[layer] if kind == "pooled" else values)[self.rows(block)]


def take_features(
    checkpoint: Checkpoint, images: ImageSet, cache: Path, kinds: Sequence[str] = ("pooled",)
) -> FeatureBank:
    """The features of an image set, computed unless they are in the cache.

    Any number of processes and machines may do this at a time, and a later one goes on where a killed one
    stopped; each returns when all features are there.

    Args:
        checkpoint: the backbone.
        images: the images.
        cache: folder of all features. Those of one checkpoint and image set have a folder in it, named by a
            digest of weights, normalisation, pipeline, images and precision.
        kinds: of 'pooled' and 'tokens' (see `FeatureBank`); a backbone without patches has no tokens.

    Raises:
        UserError: a pipeline that draws at random, or features that are not finite.
    """
    backbone, reader = checkpoint.backbone, _Reader(images)
    _, first = reader[0]
    if any(not torch.equal(reader[0][1], first) for _ in range(DRAWS - 1)):
        raise ImageSetError(
            f"the pipeline of the `{images.name}` images draws at random, and features are taken of each "
            "image once: give the set a test pipeline"
        )
    tokens = backbone(backbone.normalise(first[None]))
    if tokens.patches is None:
        kinds = ["pooled"]
    known = dict(layers=tokens.names, poolings=tokens.poolings, grid=tokens.grid, size=len(images))
    known["dim"] = tokens.pooled().shape[2] // len(tokens.poolings)
    decisive = {"weights": checkpoint.digest, "images": images.digest, "autocast": str(backbone.autocast)}
    identity = decisive | known
    folder = cache / f"{images.name}-{digest(identity)[:16]}"
    bank = FeatureBank(folder, images.name, labels=images.labels, **known)
    if missing := sum(not bank.has(kinds, block) for block in range(bank.num_blocks)):
        require_settings(folder, identity, "feature cache", "remove it")
        print_once(f"{', '.join(kinds)} features of {len(bank)} `{bank.name}` images into {folder}")
        _fill(bank, checkpoint, reader, kinds, missing)
    return bank


class _Reader(Dataset):
    """Images by number, as the pipeline gives them."""

    def __init__(self, images: ImageSet) -> None:
        self.images = images

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.images.dataset[index]["inputs"]


def _fill(
    bank: FeatureBank, checkpoint: Checkpoint, reader: _Reader, kinds: Sequence[str], missing: int
) -> None:
    """Compute this process's blocks, then blocks that others have left."""
    backbone, size, seen = checkpoint.backbone, reader.images.batch_size, set()

    def batches() -> Iterator[range]:
        for block in my_blocks(bank.num_blocks, lambda block: bank.has(kinds, block)):
            if block not in seen:  # workers read ahead of what is written
                seen.add(block)
                rows = range(len(bank))[bank.rows(block)]
                yield from (rows[start : start + size] for start in range(0, len(rows), size))

    loader = DataLoader(reader, batch_sampler=batches(), num_workers=reader.images.num_workers)
    bar = tqdm(total=missing, desc=f"features of {bank.name}", unit="block", disable=not is_first_process())
    with bar:
        for block, parts in groupby(loader, key=lambda batch: int(batch[0][0]) // BLOCK):
            stored: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
            for _, batch in parts:
                tokens = backbone(backbone.normalise(batch))
                for kind, found in stored.items():
                    values = tokens.pooled() if kind == "pooled" else tokens.patches[-1]
                    found.append(values.half().cpu())
            for kind, found in stored.items():
                values = torch.cat(found, dim=1 if kind == "pooled" else 0)
                if not values.isfinite().all():
                    reason = "its weights are, or they are beyond float16"
                    if missing := checkpoint.missing:
                        reason = f"the checkpoint lacks {len(missing)} weights, `{missing[0]}`, ..."
                    raise UserError(
                        f"the backbone of {checkpoint.name} gives NaN or infinite features: {reason}"
                    )
                bank.write(kind, block, values)
            bar.update()
