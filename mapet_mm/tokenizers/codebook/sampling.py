"""Feature rows for k-means: a few grid positions of every image, drawn from the image's name and a seed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from tqdm import tqdm

from mapet_mm.tokenizers.codebook.feature_shards import FeatureShards
from mapet_mm.tokenizers.grid_kmeans import GridKMeans
from mapet_mm.tokenizers.image_groups import GROUP_SIZE, GroupLoader, split
from mapet_mm.tokenizers.images import NamedImages, UnreadableImagesError, check_on_error
from mapet_mm.tokenizers.sharing import SharedTasks, process_number


def sample_positions(name: str, grid_size: int, count: int, seed: int) -> np.ndarray:
    """Distinct grid positions of one image, (count,), ascending, from its name and the seed alone."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode("utf-8", "surrogateescape"))])
    return np.sort(rng.choice(grid_size, size=count, replace=False))


def sample_features(
    tokenizer: GridKMeans,
    preprocessor: nn.Module,
    images: NamedImages,
    places: Mapping[str, int],
    folder: Path,
    preprocessing: Mapping[str, Any],
    positions_per_image: int = 4,
    seed: int = 0,
    on_error: str = "raise",
    group_size: int = GROUP_SIZE,
    num_workers: int = 2,
) -> FeatureShards:
    """Features at `positions_per_image` positions of every image; continues what earlier runs wrote.

    Any number of processes and machines may do this at a time; the features are the same bits for any number
    of them and of workers.

    Args:
        tokenizer: gives the features; its tower's device is used.
        preprocessor: MMPretrain data preprocessor with CLIP's mean and standard deviation.
        images: the images to sample.
        places: the place of each in `images`, by name.
        folder: where the features are kept; all processes must see it.
        preprocessing: what the encoder is shown; other preprocessing gives other features.
        positions_per_image: 4 of 196 is the paper's 2 %.
        seed: of the positions.
        on_error: 'raise', after all others, for images that cannot be decoded, or 'skip' them.
        group_size: images of one pass of the encoder.
        num_workers: of the loader.

    Raises:
        UnreadableImagesError: after the features of all other images are written.
        ValueError: more positions than the grid has.
    """
    check_on_error(on_error)
    grid_size = tokenizer.grid[0] * tokenizer.grid[1]
    if not 1 <= positions_per_image <= grid_size:
        raise ValueError(
            f"codebook.positions_per_image is {positions_per_image}, an image has {grid_size} grid positions"
        )
    identity = {
        **{key: value for key, value in tokenizer.metadata.items() if key != "weights"},  # the digest says it
        "preprocessing": preprocessing,
        "data_root": images.data_root,
        "dim": tokenizer.dim,
        "positions_per_image": positions_per_image,
        "seed": seed,
        "group_size": group_size,
    }
    shards = FeatureShards(folder, identity, places)
    sampler = _Sampler(tokenizer, shards, places, group_size)
    loader = GroupLoader(images, tokenizer.image_size, preprocessor, group_size, num_workers)
    unreadable: dict[str, str] = {}
    bar = tqdm(total=sampler.total, desc="sampling features", unit="image", disable=process_number()[0] > 0)
    with bar:
        for number, groups in groupby(loader.load(sampler.groups()), key=lambda group: group.task):
            unreadable |= sampler.do(number, groups, on_error == "skip", bar)
    if unreadable and on_error == "raise":
        reasons = {images.path(places[name]): reason for name, reason in unreadable.items()}
        raise UnreadableImagesError(reasons, f"the features of the others are kept in `{shards.folder}`")
    sampler.tasks.clear()
    return shards


class _Sampler:
    def __init__(
        self, tokenizer: GridKMeans, shards: FeatureShards, places: Mapping[str, int], group_size: int
    ) -> None:
        self.tokenizer, self.shards, self.places, self.group_size = tokenizer, shards, places, group_size
        self.name_of_place = {place: name for name, place in places.items()}
        lacking = {number: len(shards.lacking(number)) for number in range(len(shards.names))}
        self.total = sum(lacking.values())
        numbers = [number for number, count in lacking.items() if count]
        self.tasks = SharedTasks(shards.folder / "claims", numbers, self._done)

    def _done(self, numbers: Sequence[int]) -> set[int]:
        return {number for number in numbers if not self.shards.lacking(number)}

    def groups(self) -> Iterator[tuple[int, list[int]]]:
        """Places of the images of shards that nobody has done, a group at a time."""
        for number in self.tasks:
            places = [self.places[name] for name in self.shards.lacking(number)]
            for group in split(places, self.group_size):
                if self.tasks.is_lost(number):
                    break
                yield number, group

    def do(self, number: int, groups: Iterator, skip: bool, bar: tqdm) -> dict[str, str]:
        """Encode a shard's groups and write their rows; images that could not be read, with the reasons."""
        names: list[str] = []
        rows: list[np.ndarray] = []
        unreadable: dict[str, str] = {}
        for group in groups:
            unreadable |= {self.name_of_place[place]: reason for place, reason in group.unreadable.items()}
            if self.tasks.is_lost(number):
                continue
            features = self.tokenizer.features(group.inputs).cpu().numpy()
            for place, grid in zip(group.places, features, strict=False):
                names.append(self.name_of_place[place])
                count, seed = self.shards.per_image, self.shards.identity["seed"]
                rows.append(grid[sample_positions(names[-1], len(grid), count, seed)].astype(np.float16))
            bar.update(len(group.places) + len(group.unreadable))
        if rows or (skip and unreadable):
            features = np.concatenate(rows) if rows else np.empty((0, self.shards.dim), np.float16)
            self.shards.write(number, names, features, unreadable if skip else {})
        return unreadable
