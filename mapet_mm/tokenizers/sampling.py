"""Feature rows for k-means: a few grid positions of every image, drawn from the image's name and a seed."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float16, Float32
from torch import nn
from tqdm import tqdm

from mapet_mm.tokenizers.images import NamedImages, UnreadableImagesError, image_loader, normalise
from mapet_mm.tokenizers.kclip import KCLIP

MANIFEST = "manifest.json"
IMAGES_PER_SHARD = 1024


class FeatureShards:
    """A folder of float16 feature shards, one per 1024 images; a killed run keeps the finished ones.

    Args:
        folder: made if it does not exist.
        manifest: what the features are of; a folder with another manifest is refused.

    Raises:
        ValueError: the folder holds features of another encoder, other images or another sample.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        file = folder / MANIFEST
        if file.exists():
            found = json.loads(file.read_text())
            if other := [key for key in manifest if found.get(key) != manifest[key]]:
                raise ValueError(
                    f"feature folder `{folder}` was sampled with other {', '.join(other)}: remove it, or "
                    "choose another --out"
                )
        else:
            folder.mkdir(parents=True, exist_ok=True)
            _write_bytes(file, (json.dumps(manifest, indent=1) + "\n").encode())

    def shards(self) -> list[range]:
        """Image positions of every shard."""
        images = self.manifest["images"]
        starts = range(0, images, IMAGES_PER_SHARD)
        return [range(start, min(start + IMAGES_PER_SHARD, images)) for start in starts]

    def missing(self) -> list[int]:
        """Numbers of the shards that are not complete."""
        return [number for number in range(len(self.shards())) if not self._path(number).exists()]

    def write(self, number: int, features: Float16[np.ndarray, "rows dim"]) -> None:
        """Store a shard in one step."""
        _write_bytes(self._path(number), np.ascontiguousarray(features, dtype="<f2").tobytes())

    def read(self) -> Float32[np.ndarray, "rows dim"]:
        """All rows, in the order of the images, as float32.

        Raises:
            ValueError: a shard is truncated.
        """
        per_image, dim = self.manifest["positions_per_image"], self.manifest["dim"]
        features = np.empty((self.manifest["images"] * per_image, dim), dtype=np.float32)
        for number, images in enumerate(self.shards()):
            rows, size = len(images) * per_image, self._path(number).stat().st_size
            if size != rows * dim * 2:
                raise ValueError(
                    f"feature shard `{self._path(number)}` is truncated: expected {rows * dim * 2} bytes, "
                    f"found {size}; delete that file and run the same command again"
                )
            shard = np.fromfile(self._path(number), dtype="<f2").reshape(rows, dim)
            features[images.start * per_image : images.start * per_image + rows] = shard
        return features

    def _path(self, number: int) -> Path:
        return self.folder / f"features_{number:05d}.f16"


def sample_positions(name: str, grid_size: int, count: int, seed: int) -> np.ndarray:
    """Distinct grid positions of one image, (count,), ascending, from its name and the seed alone."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode("utf-8", "surrogateescape"))])
    return np.sort(rng.choice(grid_size, size=count, replace=False))


def sample_features(
    tokenizer: KCLIP,
    preprocessor: nn.Module,
    images: NamedImages,
    folder: Path,
    positions_per_image: int = 4,
    seed: int = 0,
    batch_size: int = 32,
    num_workers: int = 2,
) -> Float32[np.ndarray, "rows dim"]:
    """Features at `positions_per_image` positions of every image; continues what an earlier run wrote.

    Args:
        tokenizer: gives the features; its tower's device is used.
        preprocessor: MMPretrain data preprocessor with CLIP's mean and standard deviation.
        images: the images to sample.
        folder: where the shards are kept.
        positions_per_image: 4 of 196 is the paper's 2 %.
        seed: of the positions.

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
    }
    shards = FeatureShards(folder, manifest)
    unreadable = []
    for number, rows in _encode_shards(tokenizer, preprocessor, images, shards, batch_size, num_workers):
        if isinstance(rows, list):
            unreadable += rows
        else:
            shards.write(number, rows)
    if unreadable:
        raise UnreadableImagesError(unreadable, f"the features of the others are kept in `{folder}`")
    return shards.read()


def _encode_shards(
    tokenizer: KCLIP,
    preprocessor: nn.Module,
    images: NamedImages,
    shards: FeatureShards,
    batch_size: int,
    num_workers: int,
) -> Iterator[tuple[int, Float16[np.ndarray, "rows dim"] | list[tuple[str, str]]]]:
    """Each missing shard's rows, or its unreadable images."""
    todo = [(number, shards.shards()[number]) for number in shards.missing()]
    # Batches end with their shard, so that a shard is complete when its last batch is.
    batches = [(number, part) for number, shard in todo for part in _split(shard, batch_size)]
    loader = image_loader(images, [part for _, part in batches], num_workers, pin_memory=False)
    bar = tqdm(total=sum(len(shard) for _, shard in todo), desc="sampling features", unit="image")
    rows, unreadable = [], []
    for (number, part), batch in zip(batches, loader, strict=True):
        unreadable += [(images.path(position), reason) for position, reason in batch.unreadable]
        if batch.images is not None:
            features = tokenizer.features(normalise(preprocessor, batch.images)).cpu().numpy()
            rows += _pick(features, [images.names[position] for position in batch.positions], shards.manifest)
        bar.update(len(part))
        if part.stop == shards.shards()[number].stop:
            yield number, unreadable or np.concatenate(rows)
            rows, unreadable = [], []
    bar.close()


def _pick(features: np.ndarray, names: list[str], manifest: dict[str, Any]) -> list[np.ndarray]:
    count, seed = manifest["positions_per_image"], manifest["seed"]
    return [
        grid[sample_positions(name, len(grid), count, seed)].astype(np.float16)
        for name, grid in zip(names, features, strict=True)
    ]


def _split(positions: range, size: int) -> list[range]:
    return [positions[start : start + size] for start in range(0, len(positions), size)]


def _write_bytes(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
