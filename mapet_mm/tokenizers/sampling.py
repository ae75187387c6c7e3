"""Feature rows for k-means: a few grid positions of every image, drawn from the image's name and a seed."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float16
from mmengine.dist import all_gather_object, barrier, get_rank, get_world_size, is_main_process
from torch import nn
from tqdm import tqdm

from mapet_mm.tokenizers.encoding import GROUP_SIZE, GroupedImages, ImageGroup, split
from mapet_mm.tokenizers.feature_shards import FeatureShards
from mapet_mm.tokenizers.images import NamedImages, UnreadableImagesError
from mapet_mm.tokenizers.kclip import KCLIP

# Of 196: the paper's 2 %.
POSITIONS_PER_IMAGE = 4


def sample_positions(name: str, grid_size: int, count: int, seed: int) -> np.ndarray:
    """Distinct grid positions of one image, (count,), ascending, from its name and the seed alone."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode("utf-8", "surrogateescape"))])
    return np.sort(rng.choice(grid_size, size=count, replace=False))


def sample_features(
    tokenizer: KCLIP,
    preprocessor: nn.Module,
    images: NamedImages,
    folder: Path,
    positions_per_image: int = POSITIONS_PER_IMAGE,
    seed: int = 0,
    group_size: int = GROUP_SIZE,
    batch_size: int = 32,
    num_workers: int = 2,
) -> FeatureShards:
    """Features at `positions_per_image` positions of every image; continues what an earlier run wrote.

    Processes take shards in turn; the features are the same bits for any number of them, of workers and for
    any batch size.

    Args:
        tokenizer: gives the features; its tower's device is used.
        preprocessor: MMPretrain data preprocessor with CLIP's mean and standard deviation.
        images: the images to sample.
        folder: where the shards are kept; all processes must see it.
        positions_per_image: drawn of each image's grid.
        seed: of the positions.
        group_size: images of one pass of the encoder.
        batch_size: images that a loader's worker hands over at a time.
        num_workers: of the loader, in each process.

    Raises:
        UnreadableImagesError: after all other shards are written.
        ValueError: more positions than the grid has, or a folder of another sample.
    """
    grid_size = tokenizer.grid[0] * tokenizer.grid[1]
    if not 1 <= positions_per_image <= grid_size:
        raise ValueError(
            f"codebook.positions_per_image is {positions_per_image}, an image has {grid_size} grid positions"
        )
    names_digest = hashlib.sha256("\n".join(images.names).encode("utf-8", "surrogateescape")).hexdigest()
    manifest = {
        **tokenizer.metadata,
        "dim": tokenizer.dim,
        "images": len(images),
        "images_digest": names_digest,
        "positions_per_image": positions_per_image,
        "seed": seed,
        "group_size": group_size,
    }
    shards = FeatureShards(folder, manifest)
    # Before any process writes one.
    missing = shards.missing()
    barrier()
    todo = missing[get_rank() :: get_world_size()]
    groups = {number: split(shards.images()[number], group_size) for number in todo}
    encoded = GroupedImages(
        images,
        [group for number in todo for group in groups[number]],
        group_size,
        tokenizer.image_size,
        preprocessor,
        batch_size,
        num_workers,
    )
    total = sum(len(shards.images()[number]) for number in todo)
    unreadable = []
    with tqdm(total=total, desc="sampling features", unit="image", disable=not is_main_process()) as bar:
        stream = iter(encoded)
        for number in todo:
            of_shard = islice(stream, len(groups[number]))
            rows, missed = _sample_shard(tokenizer, of_shard, images, manifest, bar)
            unreadable += missed
            if not missed:
                shards.write(number, rows)
    # Also where the processes wait for each other.
    unreadable = [image for of_rank in all_gather_object(unreadable) for image in of_rank]
    if unreadable:
        raise UnreadableImagesError(unreadable, f"the features of the others are kept in `{folder}`")
    return shards


def _sample_shard(
    tokenizer: KCLIP, groups: Iterable[ImageGroup], images: NamedImages, manifest: dict[str, Any], bar: tqdm
) -> tuple[Float16[np.ndarray, "rows dim"], list[tuple[str, str]]]:
    """Rows of the images of one shard, and those that could not be read."""
    rows, unreadable = [], []
    for group in groups:
        features = tokenizer.features(group.inputs).cpu().numpy()[group.slots]
        names = [images.names[position] for position in group.positions]
        rows += _pick(features, names, manifest)
        unreadable += [(images.path(position), reason) for position, reason in group.unreadable]
        bar.update(len(group.positions) + len(group.unreadable))
    return np.concatenate(rows) if rows else np.empty((0, tokenizer.dim), np.float16), unreadable


def _pick(features: np.ndarray, names: list[str], manifest: dict[str, Any]) -> Iterator[np.ndarray]:
    count, seed = manifest["positions_per_image"], manifest["seed"]
    return (
        grid[sample_positions(name, len(grid), count, seed)].astype(np.float16)
        for name, grid in zip(names, features, strict=True)
    )
