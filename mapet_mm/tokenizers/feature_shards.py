"""Sampled encoder features on disk: float16 shards, each with the features of some images."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float16, Float32, Int64
from safetensors.numpy import save

from mapet_mm.structures.image_names import changed_since
from mapet_mm.structures.tensor_files import TensorFile, decode_names, encode_name, text_tensor
from mapet_mm.utils.atomic_files import replace_file, replace_json
from mapet_mm.utils.errors import UserError

MANIFEST = "manifest.json"
IMAGES_PER_SHARD = 256
# Largest variance of the errors of rounding to float16, as a share of the features'. k-means averages errors
# out: with 23 % the centroids are as good as in float32, with 73 % the inertia is two thirds higher. Features
# whose mean is not large against their spread have 1e-7. Measured on this many rows.
LARGEST_ERROR, ERROR_ROWS = 0.25, 1024


class FeatureError(UserError, ValueError):
    """Features cannot be written or read; the message is one line that says what to do."""


class Header(NamedTuple):
    """What a shard holds.

    Args:
        names: the images with features, in order.
        skipped: images that could not be decoded, with the reason.
        replaced: how often features of images that had changed were removed from it.
    """

    names: list[str]
    skipped: dict[str, str]
    replaced: int


class FeatureShards:
    """Features at sampled positions of each image, in one folder per encoder and sample.

    An image's name decides its shard, and a shard is a file that is written once, so adding or removing an
    image costs only that image. Rows are numbered across all shards, in the order of the names in each.
    Shards are read, not memory-mapped: mapped pages count as the process's memory, and each iteration of
    k-means reads them all.

    Args:
        folder: holds all features of a codebook.
        identity: encoder, preprocessing and sample of the features, with `positions_per_image` and `dim`, and
            with `data_root` if it is to look for changes.
        names: the images to use; others in the shards are ignored.
        retry_skipped: whether images that could not be decoded before count as lacking.
        look_for_changes: whether images count as lacking whose files have changed since. A copy of the images
            on another machine may well have, so this is not for runs that only go on.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        names: Iterable[str],
        retry_skipped: bool = False,
        look_for_changes: bool = False,
    ) -> None:
        self.identity = json.loads(json.dumps(identity, sort_keys=True, default=str))
        digest = hashlib.sha256(json.dumps(self.identity).encode()).hexdigest()
        self.folder = folder / digest[:12]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.retry_skipped = retry_skipped
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
        existing = [number for number in range(shards) if look_for_changes and self._path(number).exists()]
        self._outdated = {number: self._look(number) for number in existing}

    @property
    def dim(self) -> int:
        """Feature channels."""
        return self.identity["dim"]

    @property
    def per_image(self) -> int:
        """Rows per image."""
        return self.identity["positions_per_image"]

    def lacking(self, number: int) -> list[str]:
        """Images of a shard that have neither features nor, unless tried again, a reason for having none."""
        if not self._path(number).exists():
            return self.names[number]
        header = self._header(number)
        settled = {*header.names, *(() if self.retry_skipped else header.skipped)} - self._changed(number)
        return [name for name in self.names[number] if name not in settled]

    def write(
        self,
        number: int,
        names: Sequence[str],
        features: Float[np.ndarray, "rows dim"],
        skipped: Mapping[str, str],
    ) -> None:
        """Add a shard's missing images to those that it has, in one step; features are rounded to float16.

        Args:
            number: of the shard.
            names: images to add.
            features: rows of these images, in order.
            skipped: images that could not be decoded or encoded, with the reason.

        Raises:
            FeatureError: the features are not finite in float16, and k-means would make every centroid NaN;
                or float16 does not tell them apart.
        """
        exact, features = features, features.astype(np.float16)
        if not np.isfinite(features).all():
            raise FeatureError(
                "the encoder's features hold NaN, infinity or numbers beyond float16 "
                f"(shard {number} of `{self.folder}`): check the encoder's weights and the input images"
            )
        rows = dict(zip(names, features.reshape(-1, self.per_image, self.dim), strict=True))
        reasons, replaced = dict(skipped), 0
        if self._path(number).exists():
            header, changed = self._header(number), self._changed(number)
            old = self._open(number).rows("features").reshape(-1, self.per_image, self.dim)
            kept = {name: row for name, row in zip(header.names, old, strict=True) if name not in changed}
            replaced = header.replaced + (len(kept) < len(header.names))
            rows, reasons = kept | rows, header.skipped | reasons
        order = sorted(rows)
        tensors = {
            "names": text_tensor(map(encode_name, order)),
            "features": np.concatenate([*(rows[name] for name in order), features[:0]]).astype(np.float16),
        }
        _check_rounding(exact, features, tensors["features"])
        reasons = {name: reasons[name] for name in sorted(reasons) if name not in rows}
        metadata = {"skipped": json.dumps(reasons), "replaced": str(replaced)}
        replace_file(self._path(number), save(tensors, metadata))

    def _look(self, number: int) -> tuple[int, set[str]]:
        """When a shard was written, and its images whose files have changed since."""
        written, header = self._path(number).stat(), self._header(number)
        images = (*header.names, *header.skipped)
        root = self.identity["data_root"]
        return written.st_mtime_ns, {name for name in images if changed_since(root, name, written.st_mtime)}

    def _changed(self, number: int) -> set[str]:
        """Images of a shard whose files have changed since, unless a process has written the shard anew."""
        written, names = self._outdated.get(number, (None, set()))
        return names if self._path(number).stat().st_mtime_ns == written else set()

    @cached_property
    def _there(self) -> list[dict[str, int]]:
        """For each shard its requested images, sorted by name, with their positions in the file."""
        return [self._places(number) for number in range(len(self.names))]

    def _places(self, number: int) -> dict[str, int]:
        if not self.names[number]:
            return {}
        place = {name: index for index, name in enumerate(self._header(number).names)}
        return {name: place[name] for name in self.names[number] if name in place}

    def rows(self) -> list[range]:
        """Row numbers of every shard."""
        ends = accumulate((len(images) * self.per_image for images in self._there), initial=0)
        return [range(start, stop) for start, stop in pairwise(ends)]

    def __len__(self) -> int:
        return sum(map(len, self._there)) * self.per_image

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the features' identity, the images, and how often features were replaced."""
        content: list[Any] = [self.identity, len(self.names), list(chain.from_iterable(self._there))]
        shards = [number for number, images in enumerate(self._there) if images]
        if any(replaced := [self._header(number).replaced for number in shards]):
            content.append(replaced)  # only then, so that fits of earlier versions are continued
        return hashlib.sha256(encode_name(json.dumps(content))).hexdigest()

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

    def _header(self, number: int) -> Header:
        file = self._open(number)
        names, skipped = decode_names(file.rows("names").tobytes()), json.loads(file.metadata["skipped"])
        file.close()
        if len(names) * self.per_image != (rows := file.count("features")):
            raise file.damaged(f"{rows} rows, {self.per_image} of each image, but {len(names)} names")
        return Header(names, skipped, int(file.metadata.get("replaced", 0)))

    def _open(self, number: int) -> TensorFile:
        remedy = "remove it and run tools/fit_codebook.py again, which makes it anew"
        return TensorFile(self._path(number), FeatureError, remedy)

    def _path(self, number: int) -> Path:
        return self.folder / f"features-{number:05d}.safetensors"


def _check_rounding(
    exact: Float[np.ndarray, "rows dim"],
    rounded: Float16[np.ndarray, "rows dim"],
    shard: Float16[np.ndarray, "all_rows dim"],
) -> None:
    """Raise FeatureError if float16 does not tell a shard's features apart.

    An error that all rows share changes no distance between them, and does not count.

    Args:
        exact: features to add.
        rounded: the same in float16.
        shard: all of the shard, with those to add.
    """
    if not len(exact):
        return
    exact, rounded, shard = (rows[:: max(1, len(rows) // ERROR_ROWS)] for rows in (exact, rounded, shard))
    errors, both = rounded - exact.astype(np.float64), np.concatenate([shard, exact])
    if errors.var(axis=0).sum() > LARGEST_ERROR * both.var(axis=0, dtype=np.float64).sum():
        raise FeatureError(
            "float16, in which the encoder's features are kept, does not tell them apart: rounding "
            f"errors are more than {LARGEST_ERROR:.0%} of their variance; have the encoder centre and "
            "scale them, for example by a normalisation as its last layer"
        )
