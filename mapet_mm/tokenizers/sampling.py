"""Feature rows for k-means: a few grid positions of each image, chosen by the image's name and a seed."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float16, Float32, Int64
from safetensors import safe_open
from safetensors.numpy import save
from torch import Tensor

from mapet_mm.models.target_generators.grid_kmeans import GridKMeans
from mapet_mm.structures.stored_names import encode_name
from mapet_mm.tokenizers.image_groups import GroupLoader, ImageGroup, encode_blocks
from mapet_mm.tokenizers.images import LARGEST_SKIPPED, UnreadableImagesError
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.disk import require_room
from mapet_mm.utils.identity import folder_of

IMAGES_PER_BLOCK = 256
BEYOND_FLOAT16 = "the network gives it NaN, infinity, or features above 65504, the largest number of float16"


class FeatureBlocks(Sequence):
    """Sampled features on disk: blocks of float16 rows, `per_image` of each image, each in a file.

    A checksum of its name says which block an image is in.

    Attributes:
        names: names of the images of each block.
    """

    def __init__(self, folder: Path, names: Iterable[str], per_image: int) -> None:
        self.folder = folder
        self.per_image = per_image
        names = sorted(names)
        num_blocks = -(-len(names) // IMAGES_PER_BLOCK)
        self.names: list[list[str]] = [[] for _ in range(num_blocks)]
        for name in names:
            self.names[zlib.crc32(encode_name(name)) % num_blocks].append(name)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, block: int) -> Float16[np.ndarray, "rows dim"]:
        with safe_open(self.file(block), "numpy") as file:
            return file.get_tensor("features")

    def file(self, block: int) -> Path:
        """Path of a block."""
        return self.folder / f"features-{block:05d}.safetensors"

    def write(self, block: int, rows: Float16[np.ndarray, "rows dim"], skipped: Mapping[str, str]) -> None:
        """Write a block in one step, with the reason for each image that has no features."""
        replace_file(self.file(block), save({"features": rows}, {"skipped": json.dumps(skipped)}))

    def skipped(self, block: int) -> dict[str, str] | None:
        """Images of a block that have no features, with the reason; None if the block is not written."""
        if not self.file(block).exists():
            return None
        with safe_open(self.file(block), "numpy") as file:
            return json.loads(file.metadata()["skipped"])

    def features(self, block: int) -> dict[str, Float16[np.ndarray, "positions dim"]]:
        """Rows of each image of a block that has some, by name; none before the block is written."""
        skipped = self.skipped(block)
        if skipped is None:
            return {}
        names = [name for name in self.names[block] if name not in skipped]
        rows = self[block]
        return dict(zip(names, rows.reshape(len(names), self.per_image, rows.shape[1]), strict=True))

    def pending(self, block: int, retry_skipped: bool) -> list[str]:
        """Names of the images that a block waits for: all, because it is written in one step, or none.

        With `retry_skipped`, a block that is written waits for the images that it skipped.
        """
        skipped = self.skipped(block)
        if skipped is None:
            return self.names[block]
        return list(skipped) if retry_skipped else []

    def summary(self) -> tuple[list[int], dict[str, str]]:
        """Number of rows of each block, once all are written, and the reason by image without features."""
        sizes = []
        all_skipped: dict[str, str] = {}
        for block, names in enumerate(self.names):
            skipped = self.skipped(block)
            sizes.append(self.per_image * (len(names) - len(skipped)))
            all_skipped.update(skipped)
        return sizes, all_skipped


def sample_features(
    tokenizer: GridKMeans,
    loader: GroupLoader,
    indices: Mapping[str, int],
    folder: Path,
    preprocessing: Mapping[str, Any],
    positions_per_image: int = 4,
    seed: int = 0,
    on_error: str = "raise",
    max_skipped: float = LARGEST_SKIPPED,
) -> FeatureBlocks:
    """Sample features at `positions_per_image` positions of each image, continuing earlier runs.

    Any number of processes and machines may do this at once; the features are bit-identical for any number of
    processes and workers.

    Args:
        tokenizer: computes the features.
        loader: loads the images.
        indices: the images to sample: index in the loader's dataset by name (see `draw_images`).
        folder: receives the features; all processes must see it.
        preprocessing: how images are prepared for the encoder.
        positions_per_image: 4 of 196 are the paper's 2 %.
        seed: for the positions.
        on_error: for images that cannot be decoded, or whose features float16 does not hold: 'raise' once all
            other blocks are done, or 'skip' them.
        max_skipped: share of the images; if earlier runs skipped more, these images are tried again.

    Raises:
        UnreadableImagesError: after the features of all other blocks are written.
        UserError: the disk has no room for the features.
        ValueError: more positions than the grid has.
    """
    identity = features_identity(tokenizer, loader, indices, preprocessing, positions_per_image, seed)
    blocks = FeatureBlocks(folder_of(folder, identity, indices), indices, positions_per_image)
    blocks.folder.mkdir(parents=True, exist_ok=True)
    skipped_by_block = [blocks.skipped(block) for block in range(len(blocks))]
    num_skipped = sum(len(skipped or ()) for skipped in skipped_by_block)
    retry_skipped = on_error != "skip" or num_skipped > max_skipped * len(indices)

    unwritten = [
        names for names, skipped in zip(blocks.names, skipped_by_block, strict=True) if skipped is None
    ]
    num_rows = positions_per_image * sum(map(len, unwritten))
    num_bytes = 2 * num_rows * tokenizer.dim  # float16
    require_room(folder, num_bytes, "sampled features", "give --out on another disk")

    def pending(block: int) -> list[int]:
        return [indices[name] for name in blocks.pending(block, retry_skipped)]

    def encode(group: ImageGroup) -> Iterable[Float16[np.ndarray, "positions dim"]]:
        features = tokenizer.features(group.inputs)  # B (H W) D
        grid_size = features.shape[1]
        drawn = np.empty((len(group.indices), positions_per_image), np.int64)
        for row, index in zip(drawn, group.indices, strict=True):
            row[:] = draw_positions(loader.images.name(index), seed, grid_size, positions_per_image)
        return rows_at(features, torch.from_numpy(drawn)).numpy()

    unreadable: dict[str, str] = {}
    for block, rows, reasons in encode_blocks(loader, encode, len(blocks), pending, "sampling features"):
        if not pending(block):  # another process was faster, and the block was broken off
            continue
        kept, skipped = finite_rows(blocks.names[block], blocks.features(block), indices, rows, reasons)
        unreadable.update(skipped)
        if not skipped or on_error == "skip":
            no_rows = np.empty((0, tokenizer.dim), np.float16)
            blocks.write(block, np.concatenate([*kept, no_rows]), skipped)
    if unreadable and on_error != "skip":
        reasons_by_path = {loader.images.path(indices[name]): why for name, why in unreadable.items()}
        raise UnreadableImagesError(
            reasons_by_path, f"the features of the others are kept in `{blocks.folder}`"
        )
    return blocks


def features_identity(
    tokenizer: GridKMeans,
    loader: GroupLoader,
    names: Iterable[str],
    preprocessing: Mapping[str, Any],
    positions_per_image: int,
    seed: int,
) -> dict[str, Any]:
    """All that decides sampled features: they lie in a folder named by its digest."""
    names_digest = hashlib.sha256()
    for name in names:  # as one text, they would take more memory than all else
        names_digest.update(encode_name(name) + b"\0")
    encoder = {key: value for key, value in tokenizer.metadata.items() if key != "weights"}  # in its digest
    return {
        **encoder,
        "preprocessing": preprocessing,
        "data_root": loader.images.data_root,
        "names": names_digest.hexdigest(),
        "positions_per_image": positions_per_image,
        "seed": seed,
        "group_size": loader.group_size,
    }


def draw_images(indices: Mapping[str, int], num_images: int | None, seed: int) -> Mapping[str, int]:
    """The images to sample: `num_images` of them, drawn by the seed; all if None or if there are not more.

    Args:
        indices: index of each image by its name.
        num_images: how many to draw.
        seed: for the draw, which does not depend on the order of the images.
    """
    if num_images is None or num_images >= len(indices):
        return indices
    names = sorted(indices)
    drawn = np.random.default_rng(seed).choice(len(names), size=num_images, replace=False)
    return {names[rank]: indices[names[rank]] for rank in np.sort(drawn)}


def draw_positions(name: str, seed: int, grid_size: int, num_drawn: int) -> Int64[np.ndarray, " num_drawn"]:
    """Positions of an image's grid, ascending; ValueError if the grid has fewer."""
    random = np.random.default_rng([seed, zlib.crc32(encode_name(name))])
    return np.sort(random.choice(grid_size, size=num_drawn, replace=False))


def finite_rows(
    names: Iterable[str],
    earlier: Mapping[str, Float16[np.ndarray, "positions dim"]],
    indices: Mapping[str, int],
    rows: Mapping[int, Float16[np.ndarray, "positions dim"]],
    reasons: Mapping[int, str],
) -> tuple[list[Float16[np.ndarray, "positions dim"]], dict[str, str]]:
    """Rows of the images that have finite ones, earlier or now, and by name why the others have none."""
    kept = []
    skipped = {}
    for name in names:
        index = indices[name]
        if name in earlier:
            kept.append(earlier[name])
        elif index in reasons:
            skipped[name] = reasons[index]
        elif not np.isfinite(rows[index]).all():
            skipped[name] = BEYOND_FLOAT16
        else:
            kept.append(rows[index])
    return kept, skipped


def rows_at(
    features: Float32[Tensor, "group grid dim"], positions: Int64[Tensor, "images drawn"]
) -> Float16[Tensor, "images drawn dim"]:
    """Features of a group's first images at these positions, as they are stored, on the host.

    They are picked out and rounded on the features' device, so nothing else is copied from there. Where
    float16 does not hold them, they are infinite.
    """
    images = torch.arange(len(positions), device=features.device).unsqueeze(1)
    return features[images, positions.to(features.device)].half().cpu()
