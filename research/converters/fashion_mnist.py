"""Write Fashion-MNIST, 70,000 photographs of ten kinds of clothes (MIT licence), and scenes made of them.

    apt-get install dataset-fashion-mnist && python research/converters/fashion_mnist.py
    python research/converters/fashion_mnist.py --source FOLDER      # with the four published .gz files

makes in `<out>`:

    fashion_mnist                     ImageNet-style folder: train 60,000, val 10,000, shorter lists of train
    fashion_mnist_scenes              ADE20K-style folder: images and pixel labels (0 is background)
    fashion_mnist_scenes_unlabelled   other scenes, without labels, for pre-training

The files are always the same, and a second run changes nothing. torchvision's FashionMNIST(root,
download=True) puts the published files into root/FashionMNIST/raw.
"""

from __future__ import annotations

import gzip
import hashlib
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from scipy.ndimage import binary_fill_holes
from tqdm import tqdm

sys.path.extend([str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tools")])
from command_line import described_parser
from converters import scenes
from converters.scenes import Things
from dataset_converters._write import write_folder, write_list

from mapet_mm.utils.errors import one_line_errors

CLASSES = (
    *("t-shirt", "trousers", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle-boot"),
)
MARKER = "fashion_mnist.json"
PACKAGE = Path("/usr/share/datasets/fashion-mnist")  # Debian's dataset-fashion-mnist
SEED = 0
# Places in each class, in a random order: 1 %, 10 % and a third of the 60,000, and 5,000 others to choose by.
LISTS = {"train_600": [0, 60], "train_6000": [0, 600], "train_20000": [0, 2000], "held_out": [2000, 2500]}
SIDES = (20, 36)  # of a photograph in scenes, in pixels
# Darker pixels, of 255, are the ground: around the thing there are specks of 1 to 10.
GROUND = 16


class Photographs(NamedTuple):
    """One of the two parts: `images` (N, 28, 28) uint8, light on black, and `labels` (N,) uint8."""

    images: np.ndarray
    labels: np.ndarray


class Source(NamedTuple):
    """The source: `train` has 60,000 photographs, `val` 10,000 others."""

    train: Photographs
    val: Photographs

    @property
    def digest(self) -> str:
        """SHA-256 (hexadecimal) of all images and labels."""
        return hashlib.sha256(b"".join(array.tobytes() for part in self for array in part)).hexdigest()


def read_photographs(source: Path = PACKAGE) -> Source:
    """Read the photographs from a folder with the four published files.

    Raises:
        FileNotFoundError: one of them is not there.
    """

    def read(name: str, head: int) -> np.ndarray:
        return np.frombuffer(
            gzip.decompress((source / f"{name}-ubyte.gz").read_bytes()), np.uint8, offset=head
        )

    parts = [
        Photographs(read(f"{part}-images-idx3", 16).reshape(-1, 28, 28), read(f"{part}-labels-idx1", 8))
        for part in ("train", "t10k")
    ]
    return Source(*parts)


def write_photographs(out: Path, source: Source, lists: Mapping[str, list[int]] = LISTS) -> bool:
    """Write `{train,val}/<class>/<row>.png` (grey) and `meta/{train,val,<list>}.txt` under `out`.

    Args:
        out: the folder to make, for example `data/fashion_mnist`; result and errors are `write_folder`'s.
        source: the photographs.
        lists: shorter training lists by name, as places in a random order of each class's photographs.
    """
    rng = np.random.default_rng(SEED)
    train = source.train.labels
    orders = [rng.permutation(np.flatnonzero(train == kind)) for kind in range(len(CLASSES))]
    folders = [f"{label}_{name}" for label, name in enumerate(CLASSES)]

    def listed(rows: np.ndarray, labels: np.ndarray) -> list[tuple[str, int]]:
        return [(f"{folders[labels[row]]}/{row:05d}.png", labels[row]) for row in rows]

    def fill(folder: Path) -> None:
        for part, (images, labels) in source._asdict().items():
            for name in folders:
                (folder / part / name).mkdir(parents=True)
            names = listed(np.arange(len(images)), labels)
            progress = tqdm(names, f"writing {out.name}/{part}", delay=2)
            for (name, _), image in zip(progress, images, strict=True):
                Image.fromarray(image).save(folder / part / name, compress_level=1)
            write_list(folder / "meta" / f"{part}.txt", names)
        for name, places in lists.items():
            rows = np.sort(np.concatenate([order[slice(*places)] for order in orders]))
            write_list(folder / "meta" / f"{name}.txt", listed(rows, train))

    options = {"lists": dict(lists), "seed": SEED, "source": source.digest}
    return write_folder(Path(out), MARKER, options, fill)


def photographed_things(source: Source) -> Things:
    """The photographed things, cut out of their black ground; training scenes have training images only."""
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
    labels = np.concatenate([source.train.labels, source.val.labels])
    return Things("garment", labels, rows, draw, SIDES)


def write_scenes(
    out: Path, source: Source, training: int = 2000, validation: int = 500, labels: bool = True
) -> bool:
    """Write scenes, training ones made of training photographs only; without labels other scenes.

    Arguments and result are `write_photographs`'s, and the numbers of scenes.
    """
    seed, counts = SEED + (not labels), (training, validation)
    kept = {"seed": seed, **({} if labels else {"labels": False}), "source": source.digest}
    return scenes.write_scenes(out, MARKER, photographed_things(source), counts, kept, seed, labels)


@one_line_errors
def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder for all datasets")
    parser.add_argument("--source", type=Path, default=PACKAGE, help="folder with the four .gz files")
    args = parser.parse_args()
    source = read_photographs(args.source)
    write_photographs(args.out / "fashion_mnist", source)
    write_scenes(args.out / "fashion_mnist_scenes", source)
    write_scenes(args.out / "fashion_mnist_scenes_unlabelled", source, training=20_000, labels=False)


if __name__ == "__main__":
    main()
