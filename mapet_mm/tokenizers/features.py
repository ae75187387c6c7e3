"""Features for k-means: at a few grid positions of each image, chosen by the image's name and a seed."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float16, Float32, Int64, Shaped
from torch import Tensor

from mapet_mm.models.target_generators.grid_kmeans import GridKMeans
from mapet_mm.structures.image_files import file_digests, require_same_files
from mapet_mm.structures.names import StoredNames, encode_name, names_file
from mapet_mm.structures.parts import PENDING, Parts
from mapet_mm.structures.tensor_file import TensorFile
from mapet_mm.tokenizers.fill import GroupLoader, ImageGroup, fill
from mapet_mm.tokenizers.images import LARGEST_SKIPPED, UnreadableImagesError
from mapet_mm.utils.atomic_files import replace_file, replace_json
from mapet_mm.utils.disk import require_room
from mapet_mm.utils.identity import digest

IMAGES_PER_PART = 256
BEYOND_FLOAT16 = "the network gives it NaN, infinity, or features above 65504, the largest number of float16"


class SampledFeatures(Parts):
    """Features at some grid positions of each image, float16 `(positions, dim)`, by the images' names.

    Args:
        folder: named by all that decides the features.
        names: of the images, in order.
        positions_per_image: how many features there are of each.
        dim: width of a feature.
    """

    def __init__(self, folder: Path, names: Sequence[str], positions_per_image: int, dim: int) -> None:
        (folder / "parts").mkdir(parents=True, exist_ok=True)
        file = folder / f"names-{folder.name}.safetensors"
        if not file.exists():
            replace_file(file, names_file(names))
        stored = StoredNames(len(names), lambda: TensorFile(file))  # a million as Python objects take 130 MB
        shape = (positions_per_image, dim)
        super().__init__(folder, folder.name, "features", shape, np.float16, stored, IMAGES_PER_PART)


def sample_features(
    tokenizer: GridKMeans,
    loader: GroupLoader,
    names: Sequence[str],
    images: Int64[np.ndarray, " names"],
    folder: Path,
    preprocessing: Mapping[str, Any],
    positions_per_image: int = 4,
    seed: int = 0,
    on_error: str = "raise",
    max_skipped: float = LARGEST_SKIPPED,
) -> SampledFeatures:
    """Sample features at `positions_per_image` positions of each image, continuing earlier runs.

    Any number of processes and machines may do this at once; the features are bit-identical for any number of
    processes and workers.

    Args:
        tokenizer: computes the features.
        loader: loads the images.
        names: of the images to sample, in order (see `draw_images`).
        images: their indices in the loader's dataset.
        folder: receives the features; all processes must see it.
        preprocessing: how images are prepared for the encoder.
        positions_per_image: 4 of 196 are the paper's 2 %.
        seed: for the positions.
        on_error: for images that cannot be decoded, or whose features float16 does not hold: 'raise' once all
            others are done, or 'skip' them.
        max_skipped: share of the images; if earlier runs skipped more, these images are tried again.

    Raises:
        UnreadableImagesError: after the features of all other images are written.
        UserError: the disk has no room for the features.
        ValueError: more positions than the grid has.
    """
    identity = features_identity(tokenizer, loader, names, preprocessing, positions_per_image, seed)
    features = SampledFeatures(folder_of(folder, identity, names), names, positions_per_image, tokenizer.dim)
    num_pending = np.count_nonzero(features.all_states() == PENDING)
    num_bytes = 2 * num_pending * positions_per_image * tokenizer.dim  # float16
    require_room(folder, num_bytes, "sampled features", "give --out on another disk")

    def encode(group: ImageGroup) -> Float16[Tensor, "images positions dim"]:
        grid = tokenizer.features(group.inputs)  # B (H W) D
        drawn = np.empty((len(group.indices), positions_per_image), np.int64)
        for row, index in zip(drawn, group.indices, strict=True):
            row[:] = draw_positions(loader.images.name(index), seed, grid.shape[1], positions_per_image)
        return rows_at(grid, torch.from_numpy(drawn))

    _, unreadable = fill(
        features,
        images,
        loader,
        encode,
        "sampling features",
        lambda rows: None if np.isfinite(rows).all() else BEYOND_FLOAT16,
        on_error == "skip",
        retry_skipped=on_error != "skip" or len(features.skipped) > max_skipped * len(names),
    )
    if unreadable and on_error != "skip":
        reasons_by_path = {loader.images.path(image): why for image, why in unreadable.items()}
        raise UnreadableImagesError(
            reasons_by_path, f"the features of the others are kept in `{features.folder}`"
        )
    return features


def folder_of(parent: Path, identity: Mapping[str, Any], names: Iterable[str]) -> Path:
    """The folder of what was computed of images: named by all that decides it, but for where they lie.

    `images.json` in it has their digests. With images of which there are none, the name also stands for
    `data_root` in the identity.

    Raises:
        UserError: it was computed of other images with the same names.
    """
    digests = file_digests(identity["data_root"], names)
    if not digests:
        return parent / digest(identity)[:12]
    folder = parent / digest({key: value for key, value in identity.items() if key != "data_root"})[:12]
    record = folder / "images.json"
    if not record.exists():
        folder.mkdir(parents=True, exist_ok=True)
        replace_json(record, digests)
    remedy = "bring that one back, or remove the folder"
    require_same_files(json.loads(record.read_text()), identity["data_root"], f"`{folder}`", remedy)
    return folder


def features_identity(
    tokenizer: GridKMeans,
    loader: GroupLoader,
    names: Iterable[str],
    preprocessing: Mapping[str, Any],
    positions_per_image: int,
    seed: int,
) -> dict[str, Any]:
    """All that decides sampled features: they lie in a folder named by its digest."""
    names_digest = hashlib.sha256()
    for name in names:  # as one text, they would take more memory than all else
        names_digest.update(encode_name(name) + b"\0")
    return {
        **tokenizer.identity,
        "preprocessing": preprocessing,
        "data_root": loader.images.data_root,
        "names": names_digest.hexdigest(),
        "positions_per_image": positions_per_image,
        "seed": seed,
        "group_size": loader.group_size,
        "version": 2,  # of the files
    }


def draw_images(
    names: Shaped[np.ndarray, " names"],
    images: Int64[np.ndarray, " names"],
    num_images: int | None,
    seed: int,
) -> tuple[list[str], Int64[np.ndarray, " drawn"]]:
    """The images to sample: `num_images` of them, drawn by the seed; all if None or if there are not more.

    Args:
        names: of all images, in order.
        images: their indices.
        num_images: how many to draw.
        seed: for the draw, which does not depend on the order of the images.
    """
    if num_images is None or num_images >= len(names):
        return names.tolist(), images
    drawn = np.sort(np.random.default_rng(seed).choice(len(names), size=num_images, replace=False))
    return names[drawn].tolist(), images[drawn]


def draw_positions(name: str, seed: int, grid_size: int, num_drawn: int) -> Int64[np.ndarray, " num_drawn"]:
    """Positions of an image's grid, ascending; ValueError if the grid has fewer."""
    random = np.random.default_rng([seed, zlib.crc32(encode_name(name))])
    return np.sort(random.choice(grid_size, size=num_drawn, replace=False))


def rows_at(
    features: Float32[Tensor, "group grid dim"], positions: Int64[Tensor, "images drawn"]
) -> Float16[Tensor, "images drawn dim"]:
    """Features of a group's first images at these positions, as they are stored, on the features' device.

    Nothing else has to be copied from there. Where float16 does not hold them, they are infinite.
    """
    if features.is_cuda:
        positions = positions.pin_memory().to(features.device, non_blocking=True)
    images = torch.arange(len(positions), device=features.device).unsqueeze(1)
    return features[images, positions].half()
