"""Fashion-MNIST: 70,000 photographs of ten kinds of garment as an ImageNet-style folder.

Xiao, Rasul and Vollgraf 2017; MIT licence. Read from its four IDX files, as they are published.
`fashion_mnist_scenes.py` beside this composes the garments into scenes.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from tqdm import tqdm

from mapet_mm.datasets.folders import require, write_folder, write_list
from mapet_mm.utils.errors import UserError

CLASSES = (
    "t-shirt",
    "trousers",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
SOURCE_SIZE = 28
MARKER = "fashion_mnist.json"
# Debian's package, and where torchvision puts what it downloads, below the folder that it is given.
PACKAGE, PACKAGE_FOLDER = "dataset-fashion-mnist", Path("/usr/share/datasets/fashion-mnist")
TORCHVISION_FOLDER = "FashionMNIST/raw"
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "val": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
# What an IDX file of bytes starts with: two zeros, the type, the number of dimensions.
UNSIGNED_BYTE = 8


class SourceError(UserError, ValueError):
    """IDX files that are missing or not whole; the message is one line."""


class Photographs(NamedTuple):
    """One of the two parts: `images` (N, 28, 28) uint8, light on black, and `labels` (N,) uint8."""

    images: np.ndarray
    labels: np.ndarray


class Garments(NamedTuple):
    """The source: `train` has 60,000 photographs, `val` 10,000 of others."""

    train: Photographs
    val: Photographs

    @property
    def digest(self) -> str:
        """SHA-256 (hexadecimal) of all of it."""
        sha = hashlib.sha256()
        for part in self:
            for array in part:
                sha.update(np.ascontiguousarray(array))
        return sha.hexdigest()


@dataclass(frozen=True)
class GarmentsOptions:
    """What `write_garments` writes.

    Args:
        lists: lengths of the shorter training lists, each with as many garments of every class, each a
            part of the longer ones. By default 1 %, 10 % and a third of the 60,000.
        seed: seed of their order.
    """

    lists: tuple[int, ...] = (600, 6000, 20000)
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.seed >= 0, f"seed is {self.seed}: 0 or more")
        for length in self.lists:
            require(
                length >= len(CLASSES) and length % len(CLASSES) == 0,
                f"a list of {length} cannot have as many of each of {len(CLASSES)} classes",
            )


def find_source(given: Path | None = None, download: Path | None = None) -> Path:
    """The folder with the IDX files.

    Args:
        given: a folder that the user names; else Debian's package, and what torchvision has downloaded.
        download: where torchvision has downloaded to, or may.

    Raises:
        SourceError: none of them has the files.
    """
    below = [folder / TORCHVISION_FOLDER for folder in (given, download) if folder]
    for folder in [given, *below[:1]] if given else [PACKAGE_FOLDER, *below]:
        if all(_file(folder, name) for name in chain(*FILES.values())):
            return folder
    where = f"`{given}` has no" if given else "there are no"
    raise SourceError(
        f"{where} IDX files of Fashion-MNIST ({', '.join(chain(*FILES.values()))}): install the Debian "
        f"package {PACKAGE}, name a folder with them by --source, or let torchvision fetch them by --download"
    )


def download_source(root: Path) -> None:
    """Fetch the IDX files with torchvision, unless they are there."""
    from torchvision.datasets import FashionMNIST

    for train in (True, False):
        FashionMNIST(str(root), train=train, download=True)


def read_garments(folder: Path) -> Garments:
    """Read the four IDX files, compressed or not.

    Raises:
        SourceError: one is missing, truncated or something else.
    """
    parts = []
    for images_name, labels_name in FILES.values():
        images = read_idx(_file(folder, images_name) or folder / images_name, 3)
        labels = read_idx(_file(folder, labels_name) or folder / labels_name, 1)
        if images.shape != (len(labels), SOURCE_SIZE, SOURCE_SIZE) or labels.max() >= len(CLASSES):
            raise SourceError(
                f"`{folder}`: {images_name} is {images.shape} and {labels_name} {labels.shape} with labels "
                f"up to {labels.max()}, that is not Fashion-MNIST: fetch it again"
            )
        parts.append(Photographs(images, labels))
    return Garments(*parts)


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """An IDX file of bytes, compressed with gzip or not, whatever its name.

    Raises:
        SourceError: it is missing, truncated, or no such file.
    """
    again = "fetch it again"
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except FileNotFoundError:
        raise SourceError(f"`{path}` does not exist: correct --source, or {again}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SourceError(f"`{path}` is truncated or damaged ({error}): {again}") from None
    head = 4 + 4 * dimensions
    if len(content) < head or content[:4] != bytes([0, 0, UNSIGNED_BYTE, dimensions]):
        raise SourceError(
            f"`{path}` is no IDX file of bytes in {dimensions} dimensions (it starts with "
            f"{content[:4].hex()}): {again}"
        )
    shape = tuple(np.frombuffer(content[4:head], ">u4").astype(int).tolist())
    if len(content) - head != np.prod(shape):
        raise SourceError(
            f"`{path}` is truncated or damaged: {len(content) - head} bytes of data, its head says "
            f"{' x '.join(map(str, shape))}: {again}"
        )
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)


def _file(folder: Path, name: str) -> Path | None:
    names = (name, f"{name}.gz", name.replace("-idx", ".idx"), f"{name.replace('-idx', '.idx')}.gz")
    return next((folder / one for one in names if (folder / one).is_file()), None)


def write_garments(
    out: Path, source: Garments, options: GarmentsOptions | None = None, overwrite: bool = False
) -> bool:
    """Write `{train,val}/<class>/<row>.png` (grey) and `meta/{train,val,train_<n>}.txt` under `out`.

    Args:
        out: the folder to make, for example `data/fashion_mnist`.
        source: the photographs.
        options: what to write; the defaults if None.
        overwrite: replace a folder that was written with other options.

    Returns:
        True if the folder was written, False if it was there already with the same options.

    Raises:
        FileExistsError: `out` holds other options' data or something that is not ours.
        ValueError: a list longer than the training images of a class allow.
    """
    options = options or GarmentsOptions()
    orders = class_orders(source.train.labels, options.seed)
    fewest = min(map(len, orders))
    for length in options.lists:
        require(
            length // len(orders) <= fewest,
            f"a list of {length} needs {length // len(orders)} garments of every class, there are {fewest}",
        )

    def fill(folder: Path) -> None:
        for part, (images, labels) in source._asdict().items():
            paths = [_relative_path(row, label) for row, label in enumerate(labels)]
            for label in range(len(CLASSES)):
                (folder / part / _class_folder(label)).mkdir(parents=True)
            for path, image in zip(
                tqdm(paths, desc=f"writing {out.name}/{part}", delay=2), images, strict=True
            ):
                Image.fromarray(image).save(folder / part / path, compress_level=1)
            write_list(folder / "meta" / f"{part}.txt", zip(paths, labels, strict=True))
        for length in options.lists:
            rows = np.sort(np.concatenate([order[: length // len(orders)] for order in orders]))
            labels = source.train.labels[rows]
            paths = map(_relative_path, rows, labels)
            write_list(folder / "meta" / f"train_{length}.txt", zip(paths, labels, strict=True))

    kept = {**asdict(options), "lists": list(options.lists), "source": source.digest}
    return write_folder(Path(out), MARKER, kept, fill, overwrite)


def class_orders(labels: np.ndarray, seed: int) -> list[np.ndarray]:
    """The rows of each class in a random order; a list takes the first of each, so it is in longer ones."""
    rng = np.random.default_rng(seed)
    return [rng.permutation(np.flatnonzero(labels == kind)) for kind in range(len(CLASSES))]


def _class_folder(label: int) -> str:
    """In the order of the classes; without blanks, at which lists are split."""
    return f"{label}_{CLASSES[label].replace(' ', '-')}"


def _relative_path(row: int, label: int) -> str:
    return f"{_class_folder(label)}/{row:05d}.png"
