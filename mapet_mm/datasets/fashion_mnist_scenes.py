"""Scenes of Fashion-MNIST's garments over textures: with pixel labels, and without for pre-training."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.ndimage import binary_fill_holes

from mapet_mm.datasets.fashion_mnist import MARKER, Garments
from mapet_mm.datasets.folders import require, write_folder
from mapet_mm.datasets.scenes import Things, check_scenes, fill_scenes, fill_unlabelled

# Darker pixels, of 255, are the ground: around a garment there are specks of 1 to 10.
GROUND = 16
SMALLEST = 8


@dataclass(frozen=True)
class GarmentScenesOptions:
    """What `write_garment_scenes` and `write_unlabelled_scenes` write.

    Args:
        image_size: side of a scene, in pixels.
        training: number of training scenes, made of training garments alone.
        validation: number of validation scenes.
        min_garments: fewest garments tried for a scene (the first always finds a place).
        max_garments: most garments of a scene.
        min_size: side of the smallest garment, in pixels.
        max_size: side of the largest garment, in pixels.
        seed: seed of the scenes.
    """

    image_size: int = 64
    training: int = 2000
    validation: int = 500
    min_garments: int = 2
    max_garments: int = 4
    min_size: int = 20
    max_size: int = 36
    seed: int = 0

    def __post_init__(self) -> None:
        check_scenes(self, SMALLEST, "garments")
        require(self.seed >= 0, f"seed is {self.seed}: 0 or more")

    @property
    def counts(self) -> tuple[int, int]:
        """Fewest and most garments of a scene."""
        return self.min_garments, self.max_garments


def write_garment_scenes(
    out: Path, source: Garments, options: GarmentScenesOptions | None = None, overwrite: bool = False
) -> bool:
    """Write `{images,annotations}/{training,validation}/<id>.png` under `out`, 0 = background, 1 + class.

    Arguments, result and errors are `write_garments`'s.
    """
    options = options or GarmentScenesOptions()

    def fill(folder: Path) -> None:
        fill_scenes(folder, garment_things(source), options)

    return write_folder(Path(out), MARKER, {**asdict(options), "source": source.digest}, fill, overwrite)


def write_unlabelled_scenes(
    out: Path, source: Garments, options: GarmentScenesOptions | None = None, overwrite: bool = False
) -> bool:
    """Write `{train,val}/<id>.png` and their names in `meta/{train,val}.txt` under `out`, for pre-training.

    Other scenes than `write_garment_scenes` makes with the same seed. Arguments, result and errors are its.
    """
    options = options or GarmentScenesOptions(training=20_000, seed=1)

    def fill(folder: Path) -> None:
        fill_unlabelled(folder, garment_things(source), options)

    kept = {**asdict(options), "labels": False, "source": source.digest}
    return write_folder(Path(out), MARKER, kept, fill, overwrite)


def garment_things(source: Garments) -> Things:
    """The garments, cut out of their black ground; training scenes have training garments alone."""
    images = np.concatenate([source.train.images, source.val.images])
    border = len(source.train.images)

    @cache
    def cut_out(row: int) -> tuple[Image.Image, Image.Image]:
        covered = binary_fill_holes(images[row] >= GROUND)
        return Image.fromarray(np.uint8(255) * covered), Image.fromarray(images[row])

    def draw(row: int, side: int) -> tuple[np.ndarray, np.ndarray]:
        covers, shades = (
            np.asarray(image.resize((side, side), Image.Resampling.BICUBIC)) / 255 for image in cut_out(row)
        )
        return covers, shades

    rows = {"training": np.arange(border), "validation": np.arange(border, len(images))}
    return Things("garment", np.concatenate([source.train.labels, source.val.labels]), rows, draw)
