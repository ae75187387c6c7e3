"""Scenes: things over textures, with pixel labels in an ADE20K-style folder, or without for pre-training."""

from __future__ import annotations

import colorsys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from dataset_converters._write import fill_labelled, write_folder
from PIL import Image
from tqdm import tqdm

PARTS = ("training", "validation")
SIZE = 64  # side of a scene, in pixels
FEWEST, MOST = 2, 4  # things tried for a scene; the first always finds a place
# Where a thing covers at least this much of a pixel, the pixel is labelled; anything below is a soft edge.
INSIDE = 0.5
LUMINANCE = np.array([0.299, 0.587, 0.114])
# Light things on dimmed textures: light on dark, like the images that the backbone is pre-trained on.
DIMMING = 0.3
CONTRAST = 0.3


@dataclass(frozen=True)
class Things:
    """The things that scenes are made of.

    Args:
        noun: name of a thing in the scenes' list.
        labels: class of each thing, by its row.
        rows: the things of each of `PARTS`.
        draw: maps a row and a side in pixels to the thing's coverage of each pixel and its lightness there,
            two arrays that broadcast to (side, side), in 0..1.
        sides: smallest and largest side of a thing, in pixels.
    """

    noun: str
    labels: np.ndarray
    rows: Mapping[str, np.ndarray]
    draw: Callable[[int, int], tuple[np.ndarray, np.ndarray]]
    sides: tuple[int, int]


class Scene(NamedTuple):
    """One scene: `image` (H, W, 3) uint8; `label` (H, W) uint8, 0 = background, 1 + class of a thing;
    `things`, one dict per thing with its source `row`, its class and its `box` (left, top, side)."""

    image: np.ndarray
    label: np.ndarray
    things: list[dict]


def write_scenes(
    out: Path, marker: str, things: Things, counts: tuple[int, int], kept: Mapping, seed: int, labels: bool
) -> bool:
    """Write this many scenes of each part, with pixel labels or without; returns whether they were written.

    With labels, the files are `{images,annotations}/{training,validation}/<id>.png`, and the things of each
    scene stand in `meta/{training,validation}.jsonl`. Without, they are `{train,val}/<id>.png`, and their
    names stand in `meta/{train,val}.txt`. The marker has everything that decides them, and what is
    `kept`.

    Raises:
        FileExistsError: see `write_folder`.
    """

    def fill(folder: Path) -> None:
        for part, name, count in zip(PARTS, ("train", "val"), counts, strict=True):
            scenes = compose_scenes(things, part, count, seed)
            progress = tqdm(scenes, f"writing {out.name}/{part}", count, delay=2)
            if labels:
                fill_labelled(folder, part, progress, things.noun)
            else:
                _fill_unlabelled(folder, name, progress)

    options = {"image_size": SIZE, **dict(zip(PARTS, counts, strict=True))}
    options |= {f"min_{things.noun}s": FEWEST, f"max_{things.noun}s": MOST}
    options |= {"min_size": things.sides[0], "max_size": things.sides[1], **kept}
    return write_folder(Path(out), marker, options, fill)


def _fill_unlabelled(folder: Path, name: str, scenes: Iterable[Scene]) -> None:
    for made in (folder / name, folder / "meta"):
        made.mkdir(exist_ok=True)
    with (folder / "meta" / f"{name}.txt").open("w") as meta:
        for index, scene in enumerate(scenes):
            Image.fromarray(scene.image).save(folder / name / f"{index:05d}.png", compress_level=1)
            meta.write(f"{index:05d}.png\n")


def compose_scenes(things: Things, part: str, count: int, seed: int) -> Iterator[Scene]:
    """Yield scenes of a part; each has its own seed, so more scenes keep the first ones."""
    for index in range(count):
        yield compose_scene(np.random.default_rng([seed, PARTS.index(part), index]), things, part)


def compose_scene(rng: np.random.Generator, things: Things, part: str) -> Scene:
    """Paint things of a part over a texture, side by side."""
    canvas = DIMMING * texture(rng, SIZE, part)
    label = np.zeros((SIZE, SIZE), np.uint8)
    placed = []
    for row in rng.choice(things.rows[part], rng.integers(FEWEST, MOST + 1)):
        side = int(rng.integers(things.sides[0], things.sides[1] + 1))
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
