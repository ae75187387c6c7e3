"""What a network will see of a folder's images: said, or refused, before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Shaped
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import DefaultScope

from mapet_mm.datasets.pictures import (
    Picture,
    PictureError,
    Reading,
    look_at_path,
    of_any_size,
    require_kept,
    size_of,
    spread,
)
from mapet_mm.datasets.transforms.load_picture import LoadPicture
from mapet_mm.utils.config import nodes, type_name

PLAIN = Reading()  # without options
MOST_DECODED = 20  # of the images that are looked at
VALUES = 10_000  # pixels of each of these
# From here on a square is another picture than the photograph.
SHRUNK = 4
KEPT = 0.6
ENLARGED = 1.5
RESIZES = ("ResizeEdge", "Resize", "RandomResizedCrop")
Sample = list[Shaped[np.ndarray, "pixel band"]]


@dataclass(frozen=True)
class Look:
    """What was found.

    Attributes:
        load: config of the transform that reads the images.
        num_bands: that it gives.
        sizes: width and height of each image that was looked at.
        words: lines for the user, of what differs from photographs.
    """

    load: dict[str, Any]
    num_bands: int
    sizes: list[tuple[int, int]]
    words: list[str]

    def rendition(self, bands: Sequence[int] | None = None) -> dict[str, Any]:
        """Config of a transform that reads three bands, for a network that takes red, green and blue.

        Args:
            bands: which, from 1; None for the first three that are taken, or the first of fewer.
        """
        if self.num_bands == 3 and bands is None:
            return self.load
        taken = list(self.load.get("bands", (1, 2, 3)))
        shown = bands or (taken[:3] if len(taken) >= 3 else taken[:1] * 3)
        load = {**self.load, "type": "mapet_mm.LoadPicture", "bands": list(shown)}
        pairs = load.get("range")
        if pairs is not None and np.ndim(pairs) == 2:
            unknown = [band for band in shown if band not in taken]
            if unknown:
                raise PictureError(
                    f"--teacher-bands {unknown[0]}: --range has no values for it, but for {taken}"
                )
            load["range"] = tuple(pairs[taken.index(band)] for band in shown)
        return load


def look(paths: Sequence[str], reading: Reading = PLAIN) -> Look:
    """Look at 200 of the images, and decode 20 of those that are no photographs.

    Args:
        paths: of all images.
        reading: as asked for; its range may be two percentiles, `("1%", "99%")`.

    Raises:
        PictureError: information would be lost in silence, or the reading does not suit the images.
    """
    pictures = {path: look_at_path(path) for path in spread(paths)}
    unusual = [path for path, picture in pictures.items() if picture.kind != "photograph"]
    decoded = spread(unusual or list(pictures), MOST_DECODED)
    sizes = []
    for path, picture in pictures.items():
        with suppress(OSError), of_any_size():  # it is broken; the tokenizer names the image
            sizes.append(size_of(path, picture))
    try:
        require_kept(pictures, reading)
    except PictureError as error:
        sample = _sample(LoadPicture(), decoded)
        raise PictureError(f"{error}; their values go {_values_words(sample)}") from error
    if reading == PLAIN and not unusual:
        return Look(dict(type="LoadImageFromFile"), 3, sizes, [])

    page = reading.page
    if page is None and all(picture.pages == 1 for picture in pictures.values()):
        page = 0
    sample = _sample(LoadPicture(bands=reading.bands, page=page), decoded)
    options = dict(range=_in_numbers(reading.range, sample), bands=reading.bands, page=page)
    LoadPicture(**options)(dict(img_path=decoded[0]))  # raises an error if the range does not suit it
    # A config says what is not the transform's default.
    defaults = dict(range=None, bands=None, page=0)
    load = {name: value for name, value in options.items() if value != defaults[name]}
    words = _reading_words(list(pictures.values()), replace(reading, range=options["range"]), sample)
    num_bands = len(reading.bands or (1, 2, 3))
    return Look(dict(type="mapet_mm.LoadPicture", **load), num_bands, sizes, words)


def picture_pipeline(
    steps: Sequence[Mapping[str, Any]], load: Mapping[str, Any], num_bands: int = 3
) -> list[dict[str, Any]]:
    """The steps of a pipeline for photographs, for pictures that another transform loads."""
    made = []
    for step in map(dict, steps):
        kind = type_name(step["type"])
        if kind == "LoadImageFromFile":
            step = dict(load)
        elif kind in RESIZES and num_bands != 3:
            step = dict(type="mapet_mm.EachBand", transforms=[step])
        made.append(step)
    return made


def as_in_training(steps: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps of a pipeline, with a training's transform for pictures that are no photographs."""
    load = load_in_training(config)
    if load is None:
        return list(steps)
    return picture_pipeline(steps, load, len(load.get("bands") or (1, 2, 3)))


def load_in_training(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `LoadPicture` of a training's config; None if its images are photographs."""
    dataset = (config.get("train_dataloader") or {}).get("dataset") or {}
    load, *_ = dataset.get("square") or dataset.get("pipeline") or [dict(type="LoadImageFromFile")]
    return load if type_name(load["type"]) == "LoadPicture" else None


def reading_pictures(config: Config, options: Mapping[str, Any]) -> Config:
    """A copy of a model's config that reads images by `LoadPicture` with these options."""
    plain = config.to_dict()
    load = dict(type="mapet_mm.LoadPicture", **options)
    num_bands = len(load.get("bands") or (1, 2, 3))
    for _, steps in list(nodes(plain)):
        if isinstance(steps, list) and any(map(_loads_image, steps)):
            steps[:] = picture_pipeline(steps, load, num_bands)
    return Config(plain, filename=config.filename)


def _loads_image(step: Any) -> bool:
    return isinstance(step, Mapping) and type_name(step.get("type", "")) == "LoadImageFromFile"


def measured_statistics(
    steps: Sequence[Mapping[str, Any]], paths: Sequence[str]
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each band of the squares of 200 images, from 0 to 255.

    Args:
        steps: of the pipeline that makes the squares.
        paths: of all images. Those that cannot be decoded are passed over.
    """
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        pipeline = Compose(list(steps))
    means = []
    squares = []
    for path in spread(paths):
        try:
            pixels = pipeline(dict(img_path=path))["img"].astype(np.float64)
        except Exception:  # of any decoder; the tokenizer names the image
            continue
        means.append(pixels.mean(axis=(0, 1)))
        squares.append((pixels**2).mean(axis=(0, 1)))
    if not means:
        raise PictureError("none of the images that were looked at can be decoded")
    mean = np.mean(means, axis=0)
    std = np.sqrt(np.maximum(np.mean(squares, axis=0) - mean**2, 1.0))
    return mean.round(3).tolist(), std.round(3).tolist()


def _sample(load: LoadPicture, paths: Sequence[str]) -> Sample:
    """Some of the values of each image; those that cannot be decoded are passed over."""
    sample = []
    for path in paths:
        try:
            values = load.values(path).values
        except (PictureError, ImportError):
            raise
        except Exception:  # of any decoder; the tokenizer names the image
            continue
        pixels = values.reshape(-1, values.shape[2])
        sample.append(pixels[:: max(1, len(pixels) // VALUES)])
    return sample


def _joined(sample: Sample) -> Shaped[np.ndarray, "pixel band"]:
    """The values of all images; as of one band, if some have more bands than others."""
    if not sample:
        raise PictureError("none of the images that were looked at can be decoded")
    if len({values.shape[1] for values in sample}) > 1:
        sample = [values.reshape(-1, 1) for values in sample]
    return np.concatenate(sample)


def _in_numbers(values: Any, sample: Sample) -> Any:
    """A range with its percentiles replaced by the values that they are of a sample, for each band."""
    if values is None or not isinstance(values[0], str):
        return values
    pixels = _joined(sample).astype(np.float64)
    pixels = np.where(np.isfinite(pixels), pixels, np.nan)
    shares = [float(share.rstrip("%")) for share in values]
    pairs = []
    for low, high in np.nanpercentile(pixels, shares, axis=0).T:  # of each band
        pairs.append((_short(low), _short(high)))
    if any(low == high for low, high in pairs):
        raise PictureError(f"--range {' '.join(values)}: a band has one value between them, {pairs}")
    return pairs[0] if len(pairs) == 1 else tuple(pairs)


def _short(value: float) -> float | int:
    """A number of six digits at most."""
    rounded = float(f"{value:.6g}")
    if rounded.is_integer():
        return int(rounded)
    return rounded


def _reading_words(pictures: Sequence[Picture], reading: Reading, sample: Sample) -> list[str]:
    """Lines about depth, bands and pages."""
    words = []
    deep = [picture for picture in pictures if picture.is_deep]
    if reading.range is not None:
        pairs = np.atleast_2d(np.asarray(reading.range, np.float64))
        shown = ", ".join(f"{low:,.6g} to {high:,.6g}" for low, high in pairs)
        pixels = _joined(sample)
        is_beyond = (pixels < pairs[:, 0]) | (pixels > pairs[:, 1])
        depth = ""
        if deep:
            depth = f"{deep[0].depth} in {len(deep)} of {len(pictures)} images looked at, "
        words.append(
            f"values: {depth}{_values_words(sample)}; {shown} become 0 to 255, "
            f"{is_beyond.mean():.1%} are beyond"
        )
    elif deep:
        words.append(f"values: {deep[0].depth}, mapped by each DICOM file's own window (another: --range)")
    most_bands = max(picture.bands for picture in pictures)
    most_pages = max(picture.pages for picture in pictures)
    if most_pages > 1:
        taken = f"page {reading.page} is taken"
        if reading.page is None:
            taken = "the pages are bands"
        words.append(f"pages: {most_pages}, {taken}")
    if reading.bands is not None:
        are_pages = reading.page is None and most_pages > 1
        total = most_pages if are_pages else most_bands
        words.append(f"bands: {' '.join(map(str, reading.bands))} of {total}")
    return words


def _values_words(sample: Sample) -> str:
    """'from 0 to 4,095 in 20 of them'."""
    if not sample:
        return "none of the images that were looked at can be decoded"
    lowest = min(np.nanmin(values) for values in sample)
    highest = max(np.nanmax(values) for values in sample)
    return f"from {lowest:,.6g} to {highest:,.6g} in {len(sample)} of them"


def size_words(sizes: Sequence[tuple[int, int]], side: int) -> list[str]:
    """A line if the square of a network's size is another picture than the image.

    Args:
        sizes: width and height of images.
        side: of the network's images in pixels.
    """
    if not sizes:
        return []
    width, height = sorted(sizes, key=lambda size: size[0] * size[1])[len(sizes) // 2]
    short_sides = np.min(sizes, axis=1)
    kept = np.median(short_sides / np.max(sizes, axis=1))
    short_side = np.median(short_sides)
    scale = short_side / side
    if 1 / ENLARGED <= scale <= SHRUNK and kept >= KEPT:
        return []
    change = f"shrinks it {scale:.2g} times (--tiles {side} takes squares of its own pixels)"
    if scale < 1:
        own = max(32, round(short_side / 16) * 16)
        cost = f"{(side / own) ** 2:.2g} times the pixels of --image-size {own}"
        change = f"enlarges it {1 / scale:.2g} times, at {cost}"
    return [
        f"sizes: {width:,} x {height:,} px (median); the square of {side} px keeps {kept:.0%} of it and "
        f"{change}"
    ]
