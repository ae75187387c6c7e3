"""Time the default evaluation of 10,000 images, and the regressions that it leaves out at 1,000 classes.

    python research/evaluation_time.py images --out work_dirs/evaluation_time
    python research/evaluation_time.py regressions --classes 1000 --rows 20000

`images` writes 10,000 images of noise in ten classes (9,000 vote), and a ViT of random weights, 4 layers,
96 wide, 28 pixels in patches of 4. It evaluates them twice: the second time the features are there.
`regressions` fits each number of labels a class once on normal features around a centre per class; the
default draws five times. Times are CPU seconds, which a busy machine changes less than the clock's.
"""

import argparse
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from continuing_gain import write_random_vit
from PIL import Image

from mapet_mm import evaluate
from mapet_mm.evaluation.features import MemoryFeatures
from mapet_mm.evaluation.protocol import Evaluated
from mapet_mm.evaluation.protocols.low_shot import LowShot
from mapet_mm.evaluation.protocols.regression import STRENGTHS, regressions

DIM = 384
VOTING = 9_000
TESTED = 1_000
CLASSES = 10
CPU = torch.device("cpu")


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


@contextmanager
def timed(title: str) -> Iterator[None]:
    """Print CPU seconds and seconds of the clock."""
    cpu = cpu_seconds()
    clock = time.monotonic()
    yield
    print(f"{title}: {cpu_seconds() - cpu:.1f} CPU s, {time.monotonic() - clock:.1f} s", flush=True)


def write_images(folder: Path) -> None:
    """Noise, a little brighter from class to class."""
    random = np.random.default_rng(0)
    for split, count in (("train", VOTING), ("val", TESTED)):
        for index in range(count):
            number = index % CLASSES
            file = folder / split / str(number) / f"{index:05d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = random.integers(0, 200, (28, 28, 3)) + 5 * number
            Image.fromarray(pixels.astype(np.uint8)).save(file)


def time_images(out: Path) -> None:
    """The default protocols, with features and from features."""
    write_random_vit(out / "random")
    if not (out / "noise").exists():
        write_images(out / "noise")
    name = f"timm:local-dir:{out.absolute() / 'random'}"
    for title in ("features and default protocols", "default protocols alone"):
        with timed(title):
            rows = evaluate(name, out / "noise", cache=out / "features")
    print(f"{len(rows)} figures")


def features(rows: int, classes: int) -> MemoryFeatures:
    """Normal features around a centre per class, each class with as many rows."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(rows) % classes
    centres = torch.randn(classes, DIM, generator=generator)
    pooled = (centres[labels] + 3 * torch.randn(rows, DIM, generator=generator))[None]
    return MemoryFeatures(
        pooled, name="train", layers=["output"], poolings=["mean"], grid=(7, 7), labels=labels
    )


def time_regressions(rows: int, classes: int) -> None:
    """Each fit apart."""
    train = features(rows, classes)
    images = SimpleNamespace(name="train", labels=train.labels, class_names=None, per_class=False)
    evaluated = Evaluated(
        dict.fromkeys(("train", "val"), train), dict.fromkeys(("train", "val"), images), CPU
    )
    few = LowShot(draws=1)
    for shots in LowShot.by_default["shots"]:
        with timed(f"{shots} a class, one of five draws"):
            few.scorers(evaluated, shots)
    standardised = train.pooled("mean").numpy()
    for strength in STRENGTHS:
        with timed(f"regression of all rows, C {strength:.3g}"):
            regressions(standardised, train.labels.numpy(), [strength])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    of_images = parts.add_parser("images")
    of_images.add_argument("--out", type=Path, required=True, help="folder for all files")
    of_features = parts.add_parser("regressions")
    of_features.add_argument("--classes", type=int, default=1000)
    of_features.add_argument("--rows", type=int, default=20_000)
    args = parser.parse_args()
    if args.part == "images":
        time_images(args.out)
    else:
        time_regressions(args.rows, args.classes)


if __name__ == "__main__":
    main()
