"""Sampled encoder features on disk: float16 shards of some images each, never read as a whole."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float16, Float32, Int64
from safetensors.numpy import save

from mapet_mm.errors import UserError
from mapet_mm.file_replacement import replace_file, replace_json
from mapet_mm.tokenizers.tensor_files import TensorFile

MANIFEST = "manifest.json"
IMAGES_PER_SHARD = 256


class FeatureError(UserError, ValueError):
    """Features that cannot be written or read; the message is one line that says what to do."""


class FeatureShards:
    """Features of images at some positions each, in a folder of their own for each encoder and sample.

    An image's name decides its shard, and a shard is a file that is written once, so images come and go at
    their own cost. Rows are numbered through all shards, in the order of the names in each. Shards are read,
    not mapped: pages of a map count as the reader's own memory, and k-means visits all of them each time.

    Args:
        folder: of all features of a codebook.
        identity: what the features are of, with `positions_per_image` and `dim`.
        names: the images wanted; others in the shards are left alone.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], names: Iterable[str]) -> None:
        self.identity = json.loads(json.dumps(identity, sort_keys=True, default=str))
        digest = hashlib.sha256(json.dumps(self.identity).encode()).hexdigest()
        self.folder = folder / digest[:12]
        self.folder.mkdir(parents=True, exist_ok=True)
        names = list(names)
        manifest = self.folder / MANIFEST
        if not manifest.exists():
            # Of processes that do this at once any may be last: they all write the same.
            shards = -(-len(names) // IMAGES_PER_SHARD)
            replace_json(manifest, {**self.identity, "shards": shards})
        try:
            shards = json.loads(manifest.read_text())["shards"]
            self.names: list[list[str]] = [[] for _ in range(shards)]
        except (ValueError, KeyError, TypeError) as error:
            raise FeatureError(f"`{manifest}` is damaged ({error}): remove `{self.folder}`") from None
        for name in sorted(names):
            self.names[zlib.crc32(name.encode("utf-8", "surrogateescape")) % len(self.names)].append(name)

    @property
    def dim(self) -> int:
        """Feature channels."""
        return self.identity["dim"]

    @property
    def per_image(self) -> int:
        """Rows of an image."""
        return self.identity["positions_per_image"]

    def lacking(self, number: int) -> list[str]:
        """Images of a shard whose features are not there, nor the reason why they cannot be."""
        path = self._path(number)
        if not path.exists():
            return self.names[number]
        there, skipped = self._header(number)
        return [name for name in self.names[number] if name not in there and name not in skipped]

    def write(
        self,
        number: int,
        names: Sequence[str],
        features: Float16[np.ndarray, "rows dim"],
        skipped: Mapping[str, str],
    ) -> None:
        """Store a shard's lacking images in one step, beside those that it has.

        Args:
            number: the shard's.
            names: images that it gets.
            features: their rows, in order.
            skipped: images that could not be decoded, with the reason.

        Raises:
            FeatureError: the features are not finite; k-means would make every centroid NaN.
        """
        if not np.isfinite(features).all():
            raise FeatureError(
                "the encoder's features hold NaN, infinity or numbers beyond float16 "
                f"(shard {number} of `{self.folder}`): check the encoder's weights and the input images"
            )
        rows = dict(zip(names, features.reshape(len(names), self.per_image, self.dim), strict=True))
        skipped = dict(skipped)
        if self._path(number).exists():
            there, skipped_before = self._header(number)
            old = self._open(number).rows("features").reshape(len(there), self.per_image, self.dim)
            rows = {**dict(zip(there, old, strict=True)), **rows}
            skipped = {**skipped_before, **skipped}
        order = sorted(rows)
        tensors = {
            "names": np.frombuffer("\n".join(order).encode("utf-8", "surrogateescape"), dtype=np.uint8),
            "features": np.concatenate([rows[name] for name in order] or [features]).astype(np.float16),
        }
        reasons = {name: skipped[name] for name in sorted(skipped) if name not in rows}
        replace_file(self._path(number), save(tensors, {"skipped": json.dumps(reasons)}))

    @cached_property
    def _wanted(self) -> list[np.ndarray]:
        """For each shard the places of the wanted images in its file; all of them are there."""
        return [self._places(number) for number in range(len(self.names))]

    def _places(self, number: int) -> Int64[np.ndarray, " images"]:
        if not self.names[number]:
            return np.empty(0, np.int64)
        there, _ = self._header(number)
        place = {name: index for index, name in enumerate(there)}
        return np.array([place[name] for name in self.names[number] if name in place], dtype=np.int64)

    def rows(self) -> list[range]:
        """Row numbers of every shard."""
        ends = [0, *accumulate(len(places) * self.per_image for places in self._wanted)]
        return [range(start, stop) for start, stop in pairwise(ends)]

    def __len__(self) -> int:
        return sum(map(len, self._wanted)) * self.per_image

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what the rows are of."""
        named: list[str] = []
        for number, places in enumerate(self._wanted):
            there = self._header(number)[0] if places.size else []
            named += [there[place] for place in places]
        content = json.dumps([self.identity, len(self.names), named])
        return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()

    def read(self, number: int) -> Float16[np.ndarray, "rows dim"]:
        """Rows of one shard.

        Raises:
            FeatureError: the shard is missing or damaged.
        """
        if not self._wanted[number].size:
            return np.empty((0, self.dim), np.float16)
        features = self._open(number).rows("features")
        wanted = self._rows_in_file(number)
        return features if len(wanted) == len(features) else features[wanted]

    def take(self, rows: Int64[np.ndarray, " count"]) -> Float32[np.ndarray, "count dim"]:
        """Some rows, in the order asked for, as float32; each is read alone."""
        taken = np.empty((len(rows), self.dim), dtype=np.float32)
        starts = [shard.start for shard in self.rows()]
        shard_of_row = np.searchsorted(starts, rows, side="right") - 1
        for number in np.unique(shard_of_row).tolist():
            read, in_file = self._open(number).row_reader("features"), self._rows_in_file(number)
            for place in np.flatnonzero(shard_of_row == number):
                taken[place] = read(int(in_file[rows[place] - starts[number]]))
        return taken

    def _rows_in_file(self, number: int) -> Int64[np.ndarray, " rows"]:
        return (self._wanted[number][:, None] * self.per_image + np.arange(self.per_image)).ravel()

    def _header(self, number: int) -> tuple[list[str], dict[str, str]]:
        """Names of the images that a shard has, in order, and of those that were skipped."""
        file = self._open(number)
        text = file.rows("names").tobytes().decode("utf-8", "surrogateescape")
        skipped = json.loads(file.metadata["skipped"])
        file.close()
        return text.split("\n") if text else [], skipped

    def _open(self, number: int) -> TensorFile:
        remedy = "remove it and run tools/fit_codebook.py again, which makes it anew"
        return TensorFile(self._path(number), FeatureError, remedy)

    def _path(self, number: int) -> Path:
        return self.folder / f"features-{number:05d}.safetensors"
