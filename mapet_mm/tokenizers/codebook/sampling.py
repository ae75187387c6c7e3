"""Feature rows for k-means: a few grid positions of every image, drawn from the image's name and a seed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mapet_mm.tokenizers.codebook.feature_shards import FeatureShards
from mapet_mm.tokenizers.grid_kmeans import GridKMeans
from mapet_mm.tokenizers.image_groups import GroupLoader, ImageGroup
from mapet_mm.tokenizers.image_tasks import ImageTasks
from mapet_mm.tokenizers.tensor_files import encode_name


def sample_positions(name: str, grid_size: int, count: int, seed: int) -> np.ndarray:
    """Distinct grid positions of one image, (count,), ascending, from its name and the seed alone."""
    rng = np.random.default_rng([seed, zlib.crc32(encode_name(name))])
    return np.sort(rng.choice(grid_size, size=count, replace=False))


def sample_features(
    tokenizer: GridKMeans,
    loader: GroupLoader,
    places: Mapping[str, int],
    folder: Path,
    preprocessing: Mapping[str, Any],
    positions_per_image: int = 4,
    seed: int = 0,
    on_error: str = "raise",
) -> FeatureShards:
    """Features at `positions_per_image` positions of every image; continues what earlier runs wrote.

    Any number of processes and machines may do this at a time; the features are the same bits for any number
    of them and of workers.

    Args:
        tokenizer: gives the features; its tower's device is used.
        loader: of the images.
        places: the images to sample: the place of each, by name.
        folder: where the features are kept; all processes must see it.
        preprocessing: what the encoder is shown; other preprocessing gives other features.
        positions_per_image: 4 of 196 is the paper's 2 %.
        seed: of the positions.
        on_error: 'raise', after all others, for images that cannot be decoded, or 'skip' them.

    Raises:
        UnreadableImagesError: after the features of all other images are written.
        ValueError: more positions than the grid has.
    """
    grid_size = tokenizer.grid[0] * tokenizer.grid[1]
    if not 1 <= positions_per_image <= grid_size:
        raise ValueError(
            f"codebook.positions_per_image is {positions_per_image}, an image has {grid_size} grid positions"
        )
    identity = {
        **{key: value for key, value in tokenizer.metadata.items() if key != "weights"},  # the digest says it
        "preprocessing": preprocessing,
        "data_root": loader.images.data_root,
        "dim": tokenizer.dim,
        "positions_per_image": positions_per_image,
        "seed": seed,
        "group_size": loader.group_size,
    }
    shards = FeatureShards(folder, identity, places)
    work = _Shards(tokenizer, shards, places)
    kept = f"the features of the others are kept in `{shards.folder}`"
    work.run(loader, "sampling features", on_error, kept)
    work.shared.clear()
    return shards


class _Shards(ImageTasks):
    """The feature rows that shards lack, a shard a task."""

    def __init__(self, tokenizer: GridKMeans, shards: FeatureShards, places: Mapping[str, int]) -> None:
        self.tokenizer, self.shards, self.places = tokenizer, shards, places
        self.name_of_place = {place: name for name, place in places.items()}
        sizes = {number: len(shards.lacking(number)) for number in range(len(shards.names))}
        super().__init__(shards.folder / "claims", {number: size for number, size in sizes.items() if size})

    def lacking(self, task: int) -> dict[int, str]:
        return {self.places[name]: name for name in self.shards.lacking(task)}

    def encode(self, group: ImageGroup) -> Iterator[np.ndarray]:
        count, seed = self.shards.per_image, self.shards.identity["seed"]
        features = self.tokenizer.features(group.inputs).cpu().numpy()
        for place, grid in zip(group.places, features, strict=False):
            positions = sample_positions(self.name_of_place[place], len(grid), count, seed)
            yield grid[positions].astype(np.float16)

    def write(self, task: int, results: Mapping[str, np.ndarray], skipped: Mapping[str, str]) -> None:
        features = [*results.values(), np.empty((0, self.shards.dim), np.float16)]
        self.shards.write(task, list(results), np.concatenate(features), skipped)
