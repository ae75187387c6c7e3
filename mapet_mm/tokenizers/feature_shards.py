"""Sampled encoder features on disk: float16 shards that are read a shard at a time, never as a whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float16, Float32, Int64

from mapet_mm.file_replacement import replace_file

MANIFEST = "manifest.json"
IMAGES_PER_SHARD = 256


class FeatureShards:
    """A folder of float16 feature shards, one per 256 images; a killed run keeps the finished ones.

    Rows are numbered through all shards, in the order of the images. Shards are read, not mapped: pages of a
    map count as the reader's own memory, and all of them are visited in every iteration of k-means.

    Args:
        folder: made if it does not exist.
        manifest: what the features are of, with `images`, `positions_per_image` and `dim`; a folder with
            another manifest is refused.

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
            replace_file(file, (json.dumps(manifest, indent=1) + "\n").encode())

    @property
    def dim(self) -> int:
        """Feature channels."""
        return self.manifest["dim"]

    def __len__(self) -> int:
        return self.manifest["images"] * self.manifest["positions_per_image"]

    def images(self) -> list[range]:
        """Image positions of every shard."""
        count = self.manifest["images"]
        return [
            range(start, min(start + IMAGES_PER_SHARD, count)) for start in range(0, count, IMAGES_PER_SHARD)
        ]

    def rows(self) -> list[range]:
        """Row numbers of every shard."""
        per_image = self.manifest["positions_per_image"]
        return [range(images.start * per_image, images.stop * per_image) for images in self.images()]

    def missing(self) -> list[int]:
        """Numbers of the shards that are not complete."""
        return [number for number in range(len(self.images())) if not self._path(number).exists()]

    def write(self, number: int, features: Float16[np.ndarray, "rows dim"]) -> None:
        """Store a shard in one step.

        Raises:
            ValueError: the features are not finite; k-means would make every centroid NaN.
        """
        if not np.isfinite(features).all():
            raise ValueError(
                "the encoder's features hold NaN, infinity or numbers beyond float16 "
                f"(shard {number} of `{self.folder}`): check the encoder's weights and the input images"
            )
        replace_file(self._path(number), np.ascontiguousarray(features, dtype="<f2").tobytes())

    def read(self, number: int) -> Float16[np.ndarray, "rows dim"]:
        """Rows of one shard.

        Raises:
            ValueError: the shard is missing or truncated.
        """
        path, expected = self._path(number), len(self.rows()[number]) * self.dim * 2
        found = path.stat().st_size if path.exists() else 0
        if found != expected:
            raise ValueError(
                f"feature shard `{path}` is truncated: expected {expected} bytes, found {found}; delete that "
                "file and run the same command again"
            )
        return np.fromfile(path, dtype="<f2").reshape(-1, self.dim)

    def take(self, rows: Int64[np.ndarray, " count"]) -> Float32[np.ndarray, "count dim"]:
        """Some rows, in the order asked for, as float32."""
        taken = np.empty((len(rows), self.dim), dtype=np.float32)
        starts = [shard.start for shard in self.rows()]
        shard_of_row = np.searchsorted(starts, rows, side="right") - 1
        for number in np.unique(shard_of_row).tolist():
            places = np.flatnonzero(shard_of_row == number)
            taken[places] = self.read(number)[rows[places] - starts[number]]
        return taken

    def _path(self, number: int) -> Path:
        return self.folder / f"features_{number:05d}.f16"
