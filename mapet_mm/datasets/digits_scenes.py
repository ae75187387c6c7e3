"""Pixel labels of the digits, and scenes of them over textures: with pixel labels, and without."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from mapet_mm.datasets.digits import (
    MARKER,
    SOURCE_SIZE,
    DigitsOptions,
    check_split_options,
    load_source,
    render_ink,
    split_source,
)
from mapet_mm.datasets.folders import write_folder
from mapet_mm.datasets.scenes import (
    INSIDE,
    PARTS,
    Scene,
    Things,
    check_scenes,
    fill_labelled,
    fill_scenes,
    fill_unlabelled,
)


@dataclass(frozen=True)
class ScenesOptions:
    """What `write_scenes` and `write_unlabelled_scenes` write.

    Args:
        image_size: side of a scene, in pixels.
        training: number of training scenes.
        validation: number of validation scenes.
        min_digits: fewest digits tried for a scene (the first always finds a place).
        max_digits: most digits of a scene.
        min_size: side of the smallest digit, in pixels.
        max_size: side of the largest digit, in pixels.
        val_per_class: as in `DigitsOptions`; training scenes are made of training digits alone.
        seed: seed of the split and of the scenes.
    """

    image_size: int = 64
    training: int = 400
    validation: int = 100
    min_digits: int = 2
    max_digits: int = 4
    min_size: int = 20
    max_size: int = 32
    val_per_class: int = 36
    seed: int = 0

    def __post_init__(self) -> None:
        check_scenes(self, SOURCE_SIZE, "digits")
        check_split_options(self.val_per_class, 1, self.seed)

    @property
    def counts(self) -> tuple[int, int]:
        """Fewest and most digits of a scene."""
        return self.min_digits, self.max_digits


def write_scenes(out: Path, options: ScenesOptions | None = None, overwrite: bool = False) -> bool:
    """Write `{images,annotations}/{training,validation}/<id>.png` under `out`.

    `meta/{training,validation}.jsonl` says for each scene which digits of the source it is made of.
    Arguments, result and errors are `write_digits`'s.
    """
    options = options or ScenesOptions()

    def fill(folder: Path) -> None:
        fill_scenes(folder, digit_things(options), options)

    return write_folder(Path(out), MARKER, asdict(options), fill, overwrite)


def write_unlabelled_scenes(out: Path, options: ScenesOptions | None = None, overwrite: bool = False) -> bool:
    """Write `{train,val}/<id>.png` and their names in `meta/{train,val}.txt` under `out`, for pre-training.

    The same split, but other scenes than `write_scenes` makes of the same options. Arguments, result and
    errors are its.
    """
    options = options or ScenesOptions(training=3000)

    def fill(folder: Path) -> None:
        fill_unlabelled(folder, digit_things(options), replace(options, seed=options.seed + 1))

    return write_folder(Path(out), MARKER, {**asdict(options), "labels": False}, fill, overwrite)


def write_pixel_labels(out: Path, options: DigitsOptions | None = None, overwrite: bool = False) -> bool:
    """Write the plain digits of `write_digits` with pixel labels, in folders as those of `write_scenes`.

    The first of training are the digits of the short list. Arguments, result and errors are
    `write_digits`'s.
    """
    options = options or DigitsOptions()

    def fill(folder: Path) -> None:
        split = split_source(options.val_per_class, options.few_per_class, options.seed)
        rest = np.setdiff1d(split.train, split.few)
        for part, rows in zip(PARTS, (np.concatenate([split.few, rest]), split.val), strict=True):
            fill_labelled(folder, part, (_labelled_digit(row, options.image_size) for row in rows), "digit")

    return write_folder(Path(out), MARKER, {**asdict(options), "pixel_labels": True}, fill, overwrite)


def _labelled_digit(row: int, size: int) -> Scene:
    ink, digit = render_ink(row, size), int(load_source().labels[row])
    label = np.where(ink / 255 >= INSIDE, digit + 1, 0).astype(np.uint8)
    return Scene(np.repeat(ink[..., None], 3, axis=2), label, [{"row": int(row), "digit": digit}])


def digit_things(options: ScenesOptions) -> Things:
    """The digits of the split, drawn in one colour as thick as their ink."""
    split = split_source(options.val_per_class, 1, options.seed)

    def draw(row: int, side: int) -> tuple[np.ndarray, np.ndarray]:
        return render_ink(row, side) / 255, np.ones(())

    return Things("digit", load_source().labels, {"training": split.train, "validation": split.val}, draw)
