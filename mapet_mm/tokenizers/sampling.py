"""Feature rows for k-means: a few grid positions of every image, chosen by the image's name and a seed."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float16
from safetensors import safe_open
from safetensors.numpy import save

from mapet_mm.models.target_generators.grid_kmeans import GridKMeans
from mapet_mm.structures.store_files import encoded
from mapet_mm.tokenizers.image_groups import GroupLoader, ImageGroup, encode_blocks
from mapet_mm.tokenizers.images import UnreadableImagesError
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.identity import digest

IMAGES_PER_BLOCK = 256
BEYOND_FLOAT16 = "the network gives it NaN, infinity, or features above 65504, the largest number of float16"


class FeatureBlocks(Sequence):
    """Sampled features on disk: blocks of float16 rows, `per_image` of each image, each in a file.

    A checksum of its name says which block an image is in.
    """

    def __init__(self, folder: Path, names: Sequence[str], per_image: int) -> None:
        self.folder, self.per_image = folder, per_image
        self.names: list[list[str]] = [[] for _ in range(-(-len(names) // IMAGES_PER_BLOCK))]
        for name in sorted(names):
            self.names[zlib.crc32(encoded(name)) % len(self.names)].append(name)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> Float16[np.ndarray, "rows dim"]:
        with safe_open(self.file(number), "numpy") as file:
            return file.get_tensor("features")

    def file(self, number: int) -> Path:
        """Path of a block."""
        return self.folder / f"features-{number:05d}.safetensors"

    def skipped(self, number: int) -> dict[str, str] | None:
        """Images of a block that have no features, with the reason; None if the block is not written."""
        if not self.file(number).exists():
            return None
        with safe_open(self.file(number), "numpy") as file:
            return json.loads(file.metadata()["skipped"])

    def left_out(self) -> tuple[list[int], dict[str, str]]:
        """Number of rows of each block, once all are written, and the reason by image without features."""
        skipped = [self.skipped(number) for number in range(len(self))]
        pairs = zip(self.names, skipped, strict=True)
        sizes = [self.per_image * (len(names) - len(out)) for names, out in pairs]
        return sizes, {name: reason for out in skipped for name, reason in out.items()}


def sample_features(
    tokenizer: GridKMeans,
    loader: GroupLoader,
    places: Mapping[str, int],
    folder: Path,
    preprocessing: Mapping[str, Any],
    positions_per_image: int = 4,
    seed: int = 0,
    on_error: str = "raise",
) -> FeatureBlocks:
    """Sample features at `positions_per_image` positions of every image, continuing earlier runs.

    Any number of processes and machines may do this at once; the features are bit-identical for any number of
    processes and workers.

    Args:
        tokenizer: computes the features.
        loader: loads the images.
        places: the images to sample: index in the loader's dataset by name.
        folder: receives the features; all processes must see it.
        preprocessing: how images are prepared for the encoder.
        positions_per_image: 4 of 196 are the paper's 2 %.
        seed: for the positions.
        on_error: for images that cannot be decoded, or whose features float16 does not hold: 'raise' once all
            other blocks are done, or 'skip' them.

    Raises:
        UnreadableImagesError: after the features of all other blocks are written.
        ValueError: more positions than the grid has.
    """
    grid_size = tokenizer.grid[0] * tokenizer.grid[1]
    names = hashlib.sha256()
    for name in places:  # as one text, they would take more memory than all else
        names.update(encoded(name) + b"\0")
    identity = {
        **{key: value for key, value in tokenizer.metadata.items() if key != "weights"},  # in the digest
        "preprocessing": preprocessing,
        "data_root": loader.images.data_root,
        "names": names.hexdigest(),
        "positions_per_image": positions_per_image,
        "seed": seed,
        "group_size": loader.group_size,
    }
    blocks = FeatureBlocks(folder / digest(identity)[:12], list(places), positions_per_image)
    blocks.folder.mkdir(parents=True, exist_ok=True)

    def lacking(number: int) -> list[int]:
        skipped = blocks.skipped(number)
        done = skipped is not None and (not skipped or on_error == "skip")
        return [] if done else [places[name] for name in blocks.names[number]]

    def encode(group: ImageGroup) -> Iterator[Float16[np.ndarray, "positions dim"]]:
        grids = tokenizer.features(group.inputs).cpu().numpy()
        for place, grid in zip(group.places, grids, strict=False):
            rng = np.random.default_rng([seed, zlib.crc32(encoded(loader.images.name(place)))])
            positions = np.sort(rng.choice(grid_size, size=positions_per_image, replace=False))
            with np.errstate(over="ignore"):
                yield grid[positions].astype(np.float16)

    unreadable: dict[str, str] = {}
    for number, features, reasons in encode_blocks(loader, encode, len(blocks), lacking, "sampling features"):
        if not lacking(number):  # another process was faster, and the block was broken off
            continue
        kept, skipped = [], {}
        for name in blocks.names[number]:
            if (rows := features.get(places[name])) is None:
                skipped[name] = reasons[places[name]]
            elif np.isfinite(rows).all():
                kept.append(rows)
            else:
                skipped[name] = BEYOND_FLOAT16
        unreadable |= skipped
        if not skipped or on_error == "skip":
            rows = np.concatenate([*kept, np.empty((0, tokenizer.dim), np.float16)])
            replace_file(blocks.file(number), save({"features": rows}, {"skipped": json.dumps(skipped)}))
    if unreadable and on_error != "skip":
        paths = {loader.images.path(places[name]): reason for name, reason in unreadable.items()}
        raise UnreadableImagesError(paths, f"the features of the others are kept in `{blocks.folder}`")
    return blocks
