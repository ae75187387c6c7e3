"""The embedded dataset: scikit-learn's 1,797 handwritten digits as an ImageNet-style folder.

In two other domains too, for transfer: dark ink on light ground, and rotated.
`digits_scenes.py` beside this composes the same digits into scenes with pixel labels.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from mapet_mm.datasets.folders import require, write_folder, write_list

NUM_CLASSES = 10
SOURCE_SIZE = 8
MARKER = "digits.json"
ROTATION_SEED = 1


class Source(NamedTuple):
    """scikit-learn's digits: `images` (1797, 8, 8) uint8, 255 = full ink, and `labels` (1797,) int64."""

    images: np.ndarray
    labels: np.ndarray


class Split(NamedTuple):
    """Rows of the source: `train` and `val` are disjoint and cover it, `few` is a balanced part of train."""

    train: np.ndarray
    val: np.ndarray
    few: np.ndarray


def _plain(ink: np.ndarray, row: int) -> np.ndarray:
    return ink


def _inverted(ink: np.ndarray, row: int) -> np.ndarray:
    return 255 - ink


def _rotated(ink: np.ndarray, row: int) -> np.ndarray:
    """Turned by an angle of the digit's own; less than a half turn apart, so that 6 and 9 stay two digits."""
    angle = np.random.default_rng([ROTATION_SEED, row]).uniform(-90, 90)
    return np.asarray(Image.fromarray(ink).rotate(angle, Image.Resampling.BICUBIC))


# How a domain shows the ink (size, size) uint8 of a row of the source.
DOMAINS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "plain": _plain,
    "inverted": _inverted,
    "rotated": _rotated,
}


@dataclass(frozen=True)
class DigitsOptions:
    """What `write_digits` writes.

    Args:
        image_size: side of the written digits, in pixels.
        val_per_class: digits of each class held out for validation.
        few_per_class: digits of each class in the short training list.
        seed: seed of the split; the same one keeps folder, domains and scenes on the same split.
        domain: 'plain' (light ink on dark ground), 'inverted' or 'rotated'.
    """

    image_size: int = 24
    val_per_class: int = 36
    few_per_class: int = 10
    seed: int = 0
    domain: str = "plain"

    def __post_init__(self) -> None:
        require(self.domain in DOMAINS, f"domain is {self.domain!r}: one of {', '.join(DOMAINS)}")
        require(self.image_size >= SOURCE_SIZE, f"image_size is {self.image_size}: at least {SOURCE_SIZE}")
        check_split_options(self.val_per_class, self.few_per_class, self.seed)


@cache
def load_source() -> Source:
    """Read the digits that ship with scikit-learn; nothing is downloaded."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError('the digits dataset needs scikit-learn: pip install "mapet_mm[digits]"') from error
    digits = load_digits()
    # The source counts ink from 0 to 16.
    return Source(np.round(digits.images * (255 / 16)).astype(np.uint8), digits.target.astype(np.int64))


def split_source(val_per_class: int, few_per_class: int, seed: int) -> Split:
    """Split the source per class at random: the same rows for the same arguments, whatever is written."""
    labels = load_source().labels
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(np.flatnonzero(labels == digit)) for digit in range(NUM_CLASSES)]
    val = np.concatenate([order[:val_per_class] for order in orders])
    train = np.concatenate([order[val_per_class:] for order in orders])
    few = np.concatenate([order[val_per_class : val_per_class + few_per_class] for order in orders])
    return Split(np.sort(train), np.sort(val), np.sort(few))


def render_ink(row: int, size: int) -> np.ndarray:
    """Return the ink of one digit of the source, (size, size) uint8, enlarged with bicubic interpolation."""
    image = Image.fromarray(load_source().images[row])
    return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC))


def write_digits(out: Path, options: DigitsOptions | None = None, overwrite: bool = False) -> bool:
    """Write `{train,val}/<class>/<row>.png` (RGB) and `meta/{train,val,train_<n>}.txt` under `out`.

    Args:
        out: the folder to make, for example `data/digits`.
        options: what to write; the defaults if None.
        overwrite: replace a folder that was written with other options.

    Returns:
        True if the folder was written, False if it was there already with the same options.

    Raises:
        FileExistsError: `out` holds other options' data or something that is not ours.
    """
    options = options or DigitsOptions()
    kept = asdict(options)
    if options.domain == "plain":  # folders written before there were domains stay valid
        del kept["domain"]
    return write_folder(Path(out), MARKER, kept, lambda folder: _fill(folder, options), overwrite)


def _fill(folder: Path, options: DigitsOptions) -> None:
    split = split_source(options.val_per_class, options.few_per_class, options.seed)
    for part, rows in (("train", split.train), ("val", split.val)):
        for row in rows:
            path = folder / part / _relative_path(row)
            path.parent.mkdir(parents=True, exist_ok=True)
            ink = DOMAINS[options.domain](render_ink(row, options.image_size), int(row))
            Image.fromarray(np.repeat(ink[..., None], 3, axis=2)).save(path)
    for name, rows in (("train", split.train), ("val", split.val), (f"train_{len(split.few)}", split.few)):
        labels = load_source().labels
        write_list(folder / "meta" / f"{name}.txt", ((_relative_path(row), labels[row]) for row in rows))


def _relative_path(row: int) -> str:
    return f"{load_source().labels[row]}/{row:04d}.png"


def check_split_options(val_per_class: int, few_per_class: int, seed: int) -> None:
    """Raise ValueError if the source has too few digits for the split, or the seed is negative."""
    smallest = int(np.bincount(load_source().labels).min())
    require(seed >= 0, f"seed is {seed}: 0 or more")
    require(val_per_class >= 1, f"val_per_class is {val_per_class}: at least 1")
    require(few_per_class >= 1, f"few_per_class is {few_per_class}: at least 1")
    require(
        val_per_class + few_per_class <= smallest,
        f"val_per_class {val_per_class} + few_per_class {few_per_class}: at most {smallest} digits per class",
    )
