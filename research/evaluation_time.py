"""Time the default evaluation of 10,000 images, and the regressions that it leaves out at 1,000 classes.

    python research/evaluation_time.py images --out work_dirs/evaluation_time
    python research/evaluation_time.py regressions --classes 1000 --rows 20000

`images` takes 9,000 photographs of clothes to vote and 1,000 to test, and a ViT of random weights, 4 layers,
96 wide, 28 pixels in patches of 4. It takes the features, then says how long each default figure took.
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

import torch
from continuing_gain import write_random_vit
from converters.fashion_mnist import read_photographs
from PIL import Image

from mapet_mm.evaluation.extraction import fill, open_bank
from mapet_mm.evaluation.features import MemoryFeatures
from mapet_mm.evaluation.image_sets import read_image_sets
from mapet_mm.evaluation.named import load_model
from mapet_mm.evaluation.protocol import Evaluated
from mapet_mm.evaluation.protocols.low_shot import LowShot
from mapet_mm.evaluation.protocols.regression import STRENGTHS, regressions
from mapet_mm.evaluation.rows import Row
from mapet_mm.evaluation.run import evaluate_data

DIM = 384
VOTING = 9_000
TESTED = 1_000
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
    """Photographs of each class, in a folder per class."""
    photographs = read_photographs().train
    for split, part in (("train", slice(0, VOTING)), ("val", slice(VOTING, VOTING + TESTED))):
        for row in range(part.start, part.stop):
            file = folder / split / str(photographs.labels[row]) / f"{row:05d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(photographs.images[row]).save(file)


def time_images(out: Path) -> None:
    """The features, and the default protocols figure by figure."""
    write_random_vit(out / "random")
    if not (out / "clothes").exists():
        write_images(out / "clothes")
    config, checkpoint = load_model(f"timm:local-dir:{out.absolute() / 'random'}")
    data = str(out / "clothes")
    with timed("features, patch tokens of the test images among them"):
        images = read_image_sets(config, data)
        for name, kinds in (("train", ["pooled"]), ("val", ["pooled", "tokens"])):
            fill(open_bank(checkpoint, images[name], out / "features"), checkpoint, images[name], kinds)

    begin = cpu_seconds()
    last = begin

    def show(row: Row) -> None:
        nonlocal last
        now = cpu_seconds()
        print(f"{row.protocol}, {row.setting}: {row.value:.1f}, {now - last:.1f} CPU s", flush=True)
        last = now

    evaluate_data(config, checkpoint, data, None, out / "features", show=show)
    print(f"all of them: {last - begin:.1f} CPU s")


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
