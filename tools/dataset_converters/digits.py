"""Write the digits datasets: scikit-learn's 1,797 handwritten digits, in three domains and with pixel labels.

    mapet-mm digits [--out data]

makes in `<out>`:

    digits                      ImageNet-style folder: train, val and a balanced short list of train
    digits_inverted, _rotated   the same digits and split in other domains
    digits_pixels               ADE20K-style folder: digits and pixel labels (0 background, 1..10 digit 0..9)

Nothing is downloaded, the files are always the same, and a second run changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

sys.path.append(str(Path(__file__).parents[1]))
from command_line import described_parser
from dataset_converters._write import fill_labelled, write_folder, write_list

from mapet_mm.utils.errors import one_line_errors

NUM_CLASSES = 10
MARKER = "digits.json"
OPTIONS = {"image_size": 24, "val_per_class": 36, "few_per_class": 10, "seed": 0}
DOMAINS = ("plain", "inverted", "rotated")  # light ink on dark ground, dark on light, each digit turned
ROTATION_SEED = 1
INSIDE = 0.5  # a pixel with at least this share of full ink is labelled; anything below is a soft edge


class Source(NamedTuple):
    """scikit-learn's digits: `images` (1797, 8, 8) uint8, 255 = full ink, and `labels` (1797,) int64."""

    images: np.ndarray
    labels: np.ndarray


class Split(NamedTuple):
    """Rows of the source: `train` and `val` are disjoint and cover it, `few` is a balanced part of train."""

    train: np.ndarray
    val: np.ndarray
    few: np.ndarray


@cache
def load_source() -> Source:
    """Read the digits that come with scikit-learn; nothing is downloaded."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    # The source counts ink from 0 to 16.
    return Source(np.round(digits.images * (255 / 16)).astype(np.uint8), digits.target.astype(np.int64))


def split_source() -> Split:
    """Split the source per class at random, always alike."""
    labels, val, few = load_source().labels, OPTIONS["val_per_class"], OPTIONS["few_per_class"]
    rng = np.random.default_rng(OPTIONS["seed"])
    orders = [rng.permutation(np.flatnonzero(labels == digit)) for digit in range(NUM_CLASSES)]
    parts = (slice(val, None), slice(val), slice(val, val + few))
    return Split(*(np.sort(np.concatenate([order[part] for order in orders])) for part in parts))


def render_ink(row: int, size: int = OPTIONS["image_size"], domain: str = "plain") -> np.ndarray:
    """One digit of the source, (size, size) uint8, enlarged with bicubic interpolation."""
    image = Image.fromarray(load_source().images[row])
    ink = image.resize((size, size), Image.Resampling.BICUBIC)
    if domain == "rotated":
        # An angle of the digit's own; less than a half turn apart, so that 6 and 9 stay two digits.
        angle = np.random.default_rng([ROTATION_SEED, int(row)]).uniform(-90, 90)
        ink = ink.rotate(angle, Image.Resampling.BICUBIC)
    return 255 - np.asarray(ink) if domain == "inverted" else np.asarray(ink)


def write_digits(out: Path, domain: str = "plain") -> bool:
    """Write `{train,val}/<class>/<row>.png` (RGB) and `meta/{train,val,train_100}.txt` under `out`.

    Args:
        out: the folder to make, for example `data/digits`; result and errors are `write_folder`'s.
        domain: one of `DOMAINS`.
    """
    labels, split = load_source().labels, split_source()

    def listed(rows: np.ndarray) -> list[tuple[str, int]]:
        return [(f"{labels[row]}/{row:04d}.png", labels[row]) for row in rows]

    def fill(folder: Path) -> None:
        for part, rows in (("train", split.train), ("val", split.val)):
            for row, (name, _) in zip(rows, listed(rows), strict=True):
                path = folder / part / name
                path.parent.mkdir(parents=True, exist_ok=True)
                ink = render_ink(row, domain=domain)
                Image.fromarray(np.repeat(ink[..., None], 3, axis=2)).save(path)
            write_list(folder / "meta" / f"{part}.txt", listed(rows))
        write_list(folder / "meta" / f"train_{len(split.few)}.txt", listed(split.few))

    # Folders written before there were domains stay valid.
    options = OPTIONS | ({} if domain == "plain" else {"domain": domain})
    return write_folder(Path(out), MARKER, options, fill)


def write_pixel_labels(out: Path) -> bool:
    """Write the plain digits with pixel labels, in folders as ADE20K's.

    The short list's digits come first in training. Result and errors are `write_digits`'s.
    """
    split = split_source()

    def labelled(rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, list[dict]]]:
        for row in rows:
            ink, digit = render_ink(row), int(load_source().labels[row])
            label = np.where(ink / 255 >= INSIDE, digit + 1, 0).astype(np.uint8)
            yield np.repeat(ink[..., None], 3, axis=2), label, [{"row": int(row), "digit": digit}]

    def fill(folder: Path) -> None:
        rest = np.setdiff1d(split.train, split.few)
        fill_labelled(folder, "training", labelled(np.concatenate([split.few, rest])), "digit")
        fill_labelled(folder, "validation", labelled(split.val), "digit")

    return write_folder(Path(out), MARKER, {**OPTIONS, "domain": "plain", "pixel_labels": True}, fill)


def write_all(out: Path) -> None:
    """Write the digits in all domains, and with pixel labels."""
    for domain in DOMAINS:
        write_digits(out / ("digits" if domain == "plain" else f"digits_{domain}"), domain)
    write_pixel_labels(out / "digits_pixels")


@one_line_errors
def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder for all datasets")
    write_all(parser.parse_args().out)
    print("next: mapet-mm fit-codebook configs/micro/kclip.py")


if __name__ == "__main__":
    main()
