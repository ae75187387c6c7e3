"""Scenes of handwritten digits over textures, with pixel labels, as an ADE20K-style folder."""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mapet_mm.datasets.digits import (
    MARKER,
    SOURCE_SIZE,
    check_split_options,
    load_source,
    render_ink,
    split_source,
)
from mapet_mm.datasets.folders import write_folder
from mapet_mm.datasets.scenes import Things, check_scenes, fill_scenes


@dataclass(frozen=True)
class ScenesOptions:
    """What `write_scenes` writes.

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


def digit_things(options: ScenesOptions) -> Things:
    """The digits of the split, drawn in one colour as thick as their ink."""
    split = split_source(options.val_per_class, 1, options.seed)

    def draw(row: int, side: int) -> tuple[np.ndarray, np.ndarray]:
        return render_ink(row, side) / 255, np.ones(())

    return Things("digit", load_source().labels, {"training": split.train, "validation": split.val}, draw)
