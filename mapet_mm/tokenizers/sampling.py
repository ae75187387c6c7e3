"""Feature rows for k-means: a few grid positions of every image, chosen by the image's name and a seed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from mapet_mm.models.target_generators.grid_kmeans import GridKMeans
from mapet_mm.structures.tensor_files import encode_name
from mapet_mm.tokenizers.feature_shards import FeatureShards
from mapet_mm.tokenizers.image_groups import GroupLoader, ImageGroup
from mapet_mm.tokenizers.image_tasks import ImageTasks
from mapet_mm.tokenizers.images import NOT_FINITE, TOO_LARGE


def sample_positions(name: str, grid_size: int, count: int, seed: int) -> np.ndarray:
    """Distinct grid positions of an image, (count,), ascending; they depend only on its name and the seed."""
    rng = np.random.default_rng([seed, zlib.crc32(encode_name(name))])
    return np.sort(rng.choice(grid_size, size=count, replace=False))


def fault(features: Float32[np.ndarray, "positions dim"]) -> str | None:
    """Why an image's features cannot be kept; None if they can."""
    if not np.isfinite(features).all():
        return NOT_FINITE
    with np.errstate(over="ignore"):
        return None if np.isfinite(features.astype(np.float16)).all() else TOO_LARGE


def sample_features(
    tokenizer: GridKMeans,
    loader: GroupLoader,
    places: Mapping[str, int],
    folder: Path,
    preprocessing: Mapping[str, Any],
    positions_per_image: int = 4,
    seed: int = 0,
    on_error: str = "raise",
    look_for_changes: bool = False,
) -> FeatureShards:
    """Sample features at `positions_per_image` positions of every image, continuing earlier runs.

    Any number of processes and machines may do this at once; the features are bit-identical for any number of
    processes and workers.

    Args:
        tokenizer: computes the features, on its tower's device.
        loader: loads the images.
        places: the images to sample: index in the loader's dataset by name.
        folder: receives the features; all processes must see it.
        preprocessing: how images are prepared for the encoder; part of the features' identity.
        positions_per_image: 4 of 196 are the paper's 2 %.
        seed: for the positions.
        on_error: for images that cannot be decoded, or whose features float16 does not hold: 'raise' once all
            others are done, those of earlier runs included, or 'skip' them.
        look_for_changes: sample images anew whose files have changed since they were sampled.

    Raises:
        UnreadableImagesError: after the features of all other images are written.
        FeatureError: float16 does not tell the features apart.
        ValueError: more positions than the grid has.
    """
    grid_size = tokenizer.grid[0] * tokenizer.grid[1]
    if not 1 <= positions_per_image <= grid_size:
        raise ValueError(
            f"codebook.positions_per_image is {positions_per_image}, an image has {grid_size} grid positions"
        )
    identity = {
        **{key: value for key, value in tokenizer.metadata.items() if key != "weights"},  # in the digest
        "preprocessing": preprocessing,
        "data_root": loader.images.data_root,
        "dim": tokenizer.dim,
        "positions_per_image": positions_per_image,
        "seed": seed,
        "group_size": loader.group_size,
    }
    shards = FeatureShards(folder, identity, places, on_error == "raise", look_for_changes)
    work = _Shards(tokenizer, shards, places)
    kept = f"the features of the others are kept in `{shards.folder}`"
    work.run(loader, "sampling features", on_error, kept)
    work.shared.clear()
    return shards


class _Shards(ImageTasks):
    """The feature rows missing in shards; a task is one shard."""

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
            yield grid[positions]

    def checked(self, results: Mapping[int, np.ndarray]) -> dict[int, np.ndarray | str]:
        return {place: fault(rows) or rows for place, rows in results.items()}

    def write(self, task: int, results: Mapping[str, np.ndarray], skipped: Mapping[str, str]) -> None:
        features = [*results.values(), np.empty((0, self.shards.dim), np.float32)]
        self.shards.write(task, list(results), np.concatenate(features), skipped)
