"""Sampled encoder features on disk: float16 shards, each with the features of some images."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float16, Float32, Int64
from safetensors.numpy import save

from mapet_mm.errors import UserError
from mapet_mm.file_replacement import replace_file, replace_json
from mapet_mm.tokenizers.tensor_files import TensorFile, decode_names, encode_name, text_tensor

MANIFEST = "manifest.json"
IMAGES_PER_SHARD = 256


class FeatureError(UserError, ValueError):
    """Features cannot be written or read; the message is one line that says what to do."""


class FeatureShards:
    """Features at sampled positions of each image, in one folder per encoder and sample.

    An image's name decides its shard, and a shard is a file that is written once, so adding or removing an
    image costs only that image. Rows are numbered across all shards, in the order of the names in each.
    Shards are read, not memory-mapped: mapped pages count as the process's memory, and each iteration of
    k-means reads them all.

    Args:
        folder: holds all features of a codebook.
        identity: encoder, preprocessing and sample of the features, with `positions_per_image` and `dim`.
        names: the images to use; others in the shards are ignored.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], names: Iterable[str]) -> None:
        self.identity = json.loads(json.dumps(identity, sort_keys=True, default=str))
        digest = hashlib.sha256(json.dumps(self.identity).encode()).hexdigest()
        self.folder = folder / digest[:12]
        self.folder.mkdir(parents=True, exist_ok=True)
        names = list(names)
        manifest = self.folder / MANIFEST
        if not manifest.exists():
            # Several processes may do this at once: they all write the same content.
            shards = -(-len(names) // IMAGES_PER_SHARD)
            replace_json(manifest, {**self.identity, "shards": shards})
        try:
            shards = json.loads(manifest.read_text())["shards"]
            self.names: list[list[str]] = [[] for _ in range(shards)]
        except (ValueError, KeyError, TypeError) as error:
            raise FeatureError(f"`{manifest}` is damaged ({error}): remove `{self.folder}`") from None
        for name in sorted(names):
            self.names[zlib.crc32(encode_name(name)) % len(self.names)].append(name)

    @property
    def dim(self) -> int:
        """Feature channels."""
        return self.identity["dim"]

    @property
    def per_image(self) -> int:
        """Rows per image."""
        return self.identity["positions_per_image"]

    def lacking(self, number: int) -> list[str]:
        """Images of a shard that have neither features nor a recorded reason for having none."""
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
        """Add a shard's missing images to those that it has, in one step.

        Args:
            number: of the shard.
            names: images to add.
            features: rows of these images, in order.
            skipped: images that could not be decoded, with the reason.

        Raises:
            FeatureError: the features are not finite, and k-means would make every centroid NaN.
        """
        if not np.isfinite(features).all():
            raise FeatureError(
                "the encoder's features hold NaN, infinity or numbers beyond float16 "
                f"(shard {number} of `{self.folder}`): check the encoder's weights and the input images"
            )
        rows = dict(zip(names, features.reshape(-1, self.per_image, self.dim), strict=True))
        reasons = dict(skipped)
        if self._path(number).exists():
            there, skipped_before = self._header(number)
            old = self._open(number).rows("features").reshape(-1, self.per_image, self.dim)
            rows = dict(zip(there, old, strict=True)) | rows
            reasons = skipped_before | reasons
        order = sorted(rows)
        tensors = {
            "names": text_tensor(map(encode_name, order)),
            "features": np.concatenate([*(rows[name] for name in order), features[:0]]).astype(np.float16),
        }
        reasons = {name: reasons[name] for name in sorted(reasons) if name not in rows}
        replace_file(self._path(number), save(tensors, {"skipped": json.dumps(reasons)}))

    @cached_property
    def _there(self) -> list[dict[str, int]]:
        """For each shard its requested images, sorted by name, with their positions in the file."""
        return [self._places(number) for number in range(len(self.names))]

    def _places(self, number: int) -> dict[str, int]:
        if not self.names[number]:
            return {}
        place = {name: index for index, name in enumerate(self._header(number)[0])}
        return {name: place[name] for name in self.names[number] if name in place}

    def rows(self) -> list[range]:
        """Row numbers of every shard."""
        ends = accumulate((len(images) * self.per_image for images in self._there), initial=0)
        return [range(start, stop) for start, stop in pairwise(ends)]

    def __len__(self) -> int:
        return sum(map(len, self._there)) * self.per_image

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the features' identity and the images."""
        content = json.dumps([self.identity, len(self.names), list(chain.from_iterable(self._there))])
        return hashlib.sha256(encode_name(content)).hexdigest()

    def read(self, number: int) -> Float16[np.ndarray, "rows dim"]:
        """Rows of one shard.

        Raises:
            FeatureError: the shard is missing or damaged.
        """
        if not self._there[number]:
            return np.empty((0, self.dim), np.float16)
        images = self._open(number).rows("features").reshape(-1, self.per_image, self.dim)
        return images[list(self._there[number].values())].reshape(-1, self.dim)

    def take(self, rows: Int64[np.ndarray, " count"]) -> Float32[np.ndarray, "count dim"]:
        """Rows by number, in the order given, as float32."""
        taken = np.empty((len(rows), self.dim), dtype=np.float32)
        for number, shard in enumerate(self.rows()):
            if (which := np.flatnonzero((rows >= shard.start) & (rows < shard.stop))).size:
                image, position = np.divmod(rows[which] - shard.start, self.per_image)
                in_file = np.array(list(self._there[number].values()))[image] * self.per_image + position
                taken[which] = list(map(self._open(number).row_reader("features"), in_file.tolist()))
        return taken

    def _header(self, number: int) -> tuple[list[str], dict[str, str]]:
        """Names of the images in a shard, in order, and those skipped, with the reason."""
        file = self._open(number)
        names, skipped = decode_names(file.rows("names").tobytes()), json.loads(file.metadata["skipped"])
        file.close()
        return names, skipped

    def _open(self, number: int) -> TensorFile:
        remedy = "remove it and run tools/fit_codebook.py again, which makes it anew"
        return TensorFile(self._path(number), FeatureError, remedy)

    def _path(self, number: int) -> Path:
        return self.folder / f"features-{number:05d}.safetensors"
