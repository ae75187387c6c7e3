"""Scenes of handwritten digits over textures, with pixel labels, as an ADE20K-style folder."""

import colorsys
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from mapet_mm.datasets.digits import (
    SOURCE_SIZE,
    check_split_options,
    load_source,
    render_ink,
    require,
    split_source,
    write_folder,
)

PARTS = ("training", "validation")
# Ink at or above this value (of 255) is labelled as the digit; less ink is a soft edge.
INK_LEVEL = 128
LUMINANCE = np.array([0.299, 0.587, 0.114])
# Textures are dimmed so that ink is light on dark, like the digits of the pre-training.
DIMMING = 0.3
CONTRAST = 0.3


@dataclass(frozen=True)
class ScenesOptions:
    """Options of `write_scenes`.

    Args:
        image_size: side of a scene, in pixels.
        training: number of training scenes.
        validation: number of validation scenes.
        min_digits: fewest digits tried for a scene (the first one always fits).
        max_digits: most digits of a scene.
        min_size: side of the smallest digit, in pixels.
        max_size: side of the largest digit, in pixels.
        val_per_class: as in `DigitsOptions`; training scenes contain training digits only.
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
        require(min(self.training, self.validation) >= 1, "training and validation: at least 1 scene each")
        require(
            1 <= self.min_digits <= self.max_digits,
            f"min_digits {self.min_digits}, max_digits {self.max_digits}: need 1 <= min <= max",
        )
        require(
            SOURCE_SIZE <= self.min_size <= self.max_size <= self.image_size,
            f"min_size {self.min_size}, max_size {self.max_size}: "
            f"need {SOURCE_SIZE} <= min <= max <= image_size {self.image_size}",
        )
        check_split_options(self.val_per_class, 1, self.seed)


class Scene(NamedTuple):
    """One scene: `image` (H, W, 3) uint8; `label` (H, W) uint8, 0 = background, 1..10 = digit 0..9;
    `digits`, one dict per digit with its source `row`, its `digit` and its `box` (left, top, side)."""

    image: np.ndarray
    label: np.ndarray
    digits: list[dict]


def write_scenes(out: Path, options: ScenesOptions | None = None, overwrite: bool = False) -> bool:
    """Write `{images,annotations}/{training,validation}/<id>.png` under `out`.

    `meta/{training,validation}.jsonl` lists the source digits of each scene. Arguments, result and errors are
    those of `write_digits`.
    """
    options = options or ScenesOptions()
    return write_folder(Path(out), asdict(options), lambda folder: _fill(folder, options), overwrite)


def _fill(folder: Path, options: ScenesOptions) -> None:
    (folder / "meta").mkdir()
    for part in PARTS:
        images, annotations = folder / "images" / part, folder / "annotations" / part
        images.mkdir(parents=True)
        annotations.mkdir(parents=True)
        with (folder / "meta" / f"{part}.jsonl").open("w") as meta:
            for index, scene in enumerate(compose_scenes(options, part)):
                name = f"{index:05d}.png"
                Image.fromarray(scene.image).save(images / name)
                Image.fromarray(scene.label).save(annotations / name)
                meta.write(json.dumps({"name": name, "digits": scene.digits}) + "\n")


def compose_scenes(options: ScenesOptions, part: str) -> Iterator[Scene]:
    """Yield the scenes of a part; each has its own seed, so the first ones do not depend on their number."""
    split = split_source(options.val_per_class, 1, options.seed)
    rows = split.train if part == "training" else split.val
    for index in range(getattr(options, part)):
        rng = np.random.default_rng([options.seed, PARTS.index(part), index])
        yield compose_scene(rng, rows, part, options)


def compose_scene(rng: np.random.Generator, rows: np.ndarray, part: str, options: ScenesOptions) -> Scene:
    """Paint digits drawn from `rows` over a texture, without overlapping ink."""
    size = options.image_size
    canvas = DIMMING * texture(rng, size, part)
    label = np.zeros((size, size), np.uint8)
    digits = []
    for row in rng.choice(rows, rng.integers(options.min_digits, options.max_digits + 1)):
        side = int(rng.integers(options.min_size, options.max_size + 1))
        ink = render_ink(row, side)
        place = _find_place(rng, label, side)
        if place is None:
            continue
        top, left = place
        window = np.s_[top : top + side, left : left + side]
        alpha = ink[..., None] / 255
        colour = contrasting_colour(rng, canvas[window][ink >= INK_LEVEL].mean(axis=0))
        canvas[window] = canvas[window] * (1 - alpha) + colour * alpha
        digit = int(load_source().labels[row])
        label[window][ink >= INK_LEVEL] = digit + 1
        digits.append({"row": int(row), "digit": digit, "box": [left, top, side]})
    return Scene(np.round(canvas * 255).astype(np.uint8), label, digits)


def _find_place(rng: np.random.Generator, label: np.ndarray, side: int) -> tuple[int, int] | None:
    room = len(label) - side + 1
    for top, left in rng.integers(0, room, (20, 2)):
        if not label[top : top + side, left : left + side].any():
            return int(top), int(left)
    return None


def contrasting_colour(rng: np.random.Generator, background: np.ndarray) -> np.ndarray:
    """Draw RGB in 0..1 until its luminance is well above the background's; white after too many tries."""
    level = float(background @ LUMINANCE)
    for hue, saturation, value in rng.random((10, 3)):
        colour = np.array(colorsys.hsv_to_rgb(hue, 0.3 * saturation, value))
        if colour @ LUMINANCE - level > CONTRAST:
            return colour
    return np.ones(3)


def texture(rng: np.random.Generator, size: int, part: str) -> np.ndarray:
    """Return a background (size, size, 3) in 0..1: noise, a gradient, stripes or a crop of a photograph."""
    kind = rng.integers(4)
    if kind == 3:
        return _photograph_crop(rng, size, part)
    weight = (_noise, _gradient, _stripes)[kind](rng, size)[..., None]
    first, second = rng.random((2, 3))
    grain = rng.normal(0, 0.02, (size, size, 1))
    return np.clip(first * (1 - weight) + second * weight + grain, 0, 1)


def _noise(rng: np.random.Generator, size: int) -> np.ndarray:
    cells = int(rng.integers(3, 17))
    coarse = Image.fromarray(rng.integers(0, 256, (cells, cells), dtype=np.uint8))
    return np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC)) / 255


def _gradient(rng: np.random.Generator, size: int) -> np.ndarray:
    along = _along(rng.uniform(0, 2 * np.pi), size)
    return (along - along.min()) / (along.max() - along.min())


def _stripes(rng: np.random.Generator, size: int) -> np.ndarray:
    period = rng.uniform(4, 16)
    return 0.5 + 0.5 * np.sin(2 * np.pi * _along(rng.uniform(0, np.pi), size) / period)


def _along(angle: float, size: int) -> np.ndarray:
    """Distance of each pixel along a direction, in pixels, (size, size)."""
    y, x = np.mgrid[:size, :size]
    return x * np.cos(angle) + y * np.sin(angle)


def _photograph_crop(rng: np.random.Generator, size: int, part: str) -> np.ndarray:
    photographs = _photographs()
    photograph = photographs[rng.integers(len(photographs))]
    # The parts crop from different halves, so no validation background occurs in training.
    middle = photograph.width // 2
    left, right = (0, middle) if part == "training" else (middle, photograph.width)
    side = int(rng.integers(size, min(right - left, photograph.height) + 1))
    x, y = int(rng.integers(left, right - side + 1)), int(rng.integers(0, photograph.height - side + 1))
    crop = photograph.crop((x, y, x + side, y + side))
    return np.asarray(crop.resize((size, size), Image.Resampling.BICUBIC)) / 255


@cache
def _photographs() -> list[Image.Image]:
    from sklearn.datasets import load_sample_images

    return [Image.fromarray(image) for image in load_sample_images().images]
