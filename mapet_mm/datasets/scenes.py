"""Scenes of things over textures, with pixel labels, as an ADE20K-style folder."""

import colorsys
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image
from tqdm import tqdm

from mapet_mm.datasets.folders import require

PARTS = ("training", "validation")
# Where a thing covers at least this much of a pixel, the pixel is labelled; what is below is a soft edge.
INSIDE = 0.5
LUMINANCE = np.array([0.299, 0.587, 0.114])
# Light things on dimmed textures: light on dark, as the images that the backbone is pre-trained on.
DIMMING = 0.3
CONTRAST = 0.3


class SceneOptions(Protocol):
    """What decides the scenes: sizes in pixels, numbers of scenes, fewest and most things of a scene."""

    image_size: int
    training: int
    validation: int
    min_size: int
    max_size: int
    seed: int

    @property
    def counts(self) -> tuple[int, int]: ...


@dataclass(frozen=True)
class Things:
    """What scenes are made of.

    Args:
        noun: what a thing is called in the scenes' list.
        labels: class of every thing, by its row.
        rows: the things of each of `PARTS`.
        draw: from a row and a side in pixels to how much the thing covers of each pixel, and how light it is
            there, two arrays that broadcast to (side, side), in 0..1.
    """

    noun: str
    labels: np.ndarray
    rows: Mapping[str, np.ndarray]
    draw: Callable[[int, int], tuple[np.ndarray, np.ndarray]]


class Scene(NamedTuple):
    """One scene: `image` (H, W, 3) uint8; `label` (H, W) uint8, 0 = background, 1 + class of a thing;
    `things`, one dict per thing with its source `row`, its class and its `box` (left, top, side)."""

    image: np.ndarray
    label: np.ndarray
    things: list[dict]


def check_scenes(options: SceneOptions, smallest: int, noun: str) -> None:
    """Raise ValueError unless such scenes can be made of things of at least `smallest` pixels."""
    fewest, most = options.counts
    require(min(options.training, options.validation) >= 1, "training and validation: at least 1 scene each")
    require(1 <= fewest <= most, f"min_{noun} {fewest}, max_{noun} {most}: need 1 <= min <= max")
    require(
        smallest <= options.min_size <= options.max_size <= options.image_size,
        f"min_size {options.min_size}, max_size {options.max_size}: "
        f"need {smallest} <= min <= max <= image_size {options.image_size}",
    )


def fill_scenes(folder: Path, things: Things, options: SceneOptions) -> None:
    """Write both parts of the scenes by `fill_labelled`."""
    for part in PARTS:
        fill_labelled(folder, part, compose_scenes(things, options, part), things.noun)


def fill_labelled(folder: Path, part: str, scenes: Iterable[Scene], noun: str) -> None:
    """Write `{images,annotations}/<part>/<id>.png`, and `meta/<part>.jsonl`.

    Each line of the latter says of which things a scene is made.
    """
    images, annotations = folder / "images" / part, folder / "annotations" / part
    for made in (images, annotations, folder / "meta"):
        made.mkdir(parents=True, exist_ok=True)
    with (folder / "meta" / f"{part}.jsonl").open("w") as meta:
        for index, scene in enumerate(scenes):
            name = f"{index:05d}.png"
            Image.fromarray(scene.image).save(images / name)
            Image.fromarray(scene.label).save(annotations / name)
            meta.write(json.dumps({"name": name, f"{noun}s": scene.things}) + "\n")


def fill_unlabelled(folder: Path, things: Things, options: SceneOptions) -> None:
    """Write `{train,val}/<id>.png`, and their names in `meta/{train,val}.txt`, for pre-training."""
    (folder / "meta").mkdir()
    for name, part in zip(("train", "val"), PARTS, strict=True):
        (folder / name).mkdir()
        count = getattr(options, part)
        scenes = compose_scenes(things, options, part)
        progress = tqdm(scenes, desc=f"writing unlabelled scenes, {name}", total=count, delay=2)
        for index, scene in enumerate(progress):
            Image.fromarray(scene.image).save(folder / name / f"{index:05d}.png", compress_level=1)
        (folder / "meta" / f"{name}.txt").write_text("".join(f"{index:05d}.png\n" for index in range(count)))


def compose_scenes(things: Things, options: SceneOptions, part: str) -> Iterator[Scene]:
    """Yield the scenes of a part; each has its own seed, so more scenes keep the first ones."""
    for index in range(getattr(options, part)):
        rng = np.random.default_rng([options.seed, PARTS.index(part), index])
        yield compose_scene(rng, things, part, options)


def compose_scene(rng: np.random.Generator, things: Things, part: str, options: SceneOptions) -> Scene:
    """Paint things of a part over a texture, none of them on top of another."""
    size, (fewest, most) = options.image_size, options.counts
    canvas = DIMMING * texture(rng, size, part)
    label = np.zeros((size, size), np.uint8)
    placed = []
    for row in rng.choice(things.rows[part], rng.integers(fewest, most + 1)):
        side = int(rng.integers(options.min_size, options.max_size + 1))
        alpha, shade = things.draw(row, side)
        place = _find_place(rng, label, side)
        if place is None:
            continue
        top, left = place
        window = np.s_[top : top + side, left : left + side]
        inside = alpha >= INSIDE
        colour = contrasting_colour(rng, canvas[window][inside].mean(axis=0))
        canvas[window] = canvas[window] * (1 - alpha[..., None]) + colour * (shade * alpha)[..., None]
        kind = int(things.labels[row])
        label[window][inside] = kind + 1
        placed.append({"row": int(row), things.noun: kind, "box": [left, top, side]})
    return Scene(np.round(canvas * 255).astype(np.uint8), label, placed)


def _find_place(rng: np.random.Generator, label: np.ndarray, side: int) -> tuple[int, int] | None:
    room = len(label) - side + 1
    for top, left in rng.integers(0, room, (20, 2)):
        if not label[top : top + side, left : left + side].any():
            return int(top), int(left)
    return None


def contrasting_colour(rng: np.random.Generator, background: np.ndarray) -> np.ndarray:
    """Draw RGB in 0..1 until its luminance is well above the background's; white after that."""
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
    # The parts crop from different halves, so that no background of the validation scenes was trained on.
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
