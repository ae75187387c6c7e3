"""Images that one core prepares in a second for a pre-training: decoded, and as stored squares.

Photographs of 500 x 375 pixels (JPEG of quality 90; random parts of four that scikit-learn and scikit-image
bring along) go through the loaders of the recipes: MMEngine's, in which each image has its seed, with one
worker of one thread. A worker's figure is images per CPU second, so other programs do not change it. The
training process, too, needs time for each image that a worker hands over. Files and squares are in the page
cache: how fast a disk reads is not measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import numpy as np
from harness import ROOT, in_fresh_process, machine, table
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.runner import Runner
from PIL import Image
from skimage import data as photographs
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader, Dataset, Sampler

from mapet_mm.datasets.samplers import seeded_loader
from mapet_mm.engine.runners.launch import load_config
from mapet_mm.structures import TokenStore
from mapet_mm.tokenizers.squares import SquareLoader, store_images

RECIPE = "configs/mapet/mapet_vit-tiny-p16_kclip_16xb128-amp-coslr-300e_in1k.py"
STORED_RECIPE = "configs/mapet/mapet_vit-tiny-p16_kclip-stored_16xb128-amp-coslr-300e_in1k.py"
WIDTH, HEIGHT, QUALITY = 500, 375, 90
BATCH = 128
TICKS = os.sysconf("SC_CLK_TCK")  # of a process's CPU time in /proc, in a second
WARM_UP = 2  # batches
ONE_THREAD = dict(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")


def read_arguments() -> Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=1024, help="photographs to write")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a measurement")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of a loader, in turns")
    return parser.parse_args()


def write_photographs(folder: Path, count: int) -> None:
    """Write random parts of four photographs, at the size of ImageNet's."""
    sources = [*load_sample_images().images, photographs.astronaut(), photographs.coffee()]
    rng = np.random.default_rng(0)
    folder.mkdir()
    for number in range(count):
        source = Image.fromarray(sources[number % len(sources)])
        share = rng.uniform(0.7, 1.0)
        width = share * source.width
        height = min(width * HEIGHT / WIDTH, source.height)
        left = rng.uniform(0, source.width - width)
        top = rng.uniform(0, source.height - height)
        box = (left, top, left + width, top + height)
        part = source.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC, box)
        part.save(folder / f"{number:05}.jpg", quality=QUALITY)


def decoding_config(root: Path) -> Config:
    """The recipe that decodes, on the photographs and their token store."""
    cfg = load_config(str(ROOT / RECIPE))
    pipeline = cfg.train_dataloader.dataset.pipeline
    for step in pipeline:
        if "store" in step:
            step.store = str(root / "tokens")
    folder = dict(data_root=str(root), data_prefix="images", with_label=False)
    cfg.train_dataloader.dataset = dict(type="CustomDataset", **folder, pipeline=pipeline)
    return cfg


def stored_config(root: Path, loader_jitters: bool) -> Config:
    """The recipe of stored squares, or one whose loader jitters them as it would decoded images."""
    cfg = load_config(str(ROOT / STORED_RECIPE))
    dataset = cfg.train_dataloader.dataset
    dataset.update(store=str(root / "tokens"), prefix="")
    if loader_jitters:
        dataset.pipeline = [cfg.color_jitter, cfg.pack]
        cfg.train_dataloader.collate_fn = dict(type="default_collate")
    return cfg


ROWS: dict[str, Callable[[Path], Config]] = {
    "recipe: decode, jitter": decoding_config,
    "stored, the loader jitters": lambda root: stored_config(root, loader_jitters=True),
    "stored, the GPU jitters": lambda root: stored_config(root, loader_jitters=False),
}


class TimedSampler(Sampler):
    """Random images for so many seconds, after the first ones, for which the worker has to start."""

    first = 1024  # images

    def __init__(self, dataset: Dataset, seconds: float, seed: int = 0) -> None:
        self.num_images = len(dataset)
        self.seconds = seconds
        self.rng = random.Random(seed)

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.first):
            yield self.rng.randrange(self.num_images)
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            yield self.rng.randrange(self.num_images)


def build_loader(cfg: Config, seconds: float) -> DataLoader:
    """The config's loader as a training has it, with one worker, for so many seconds."""
    init_default_scope("mmpretrain")
    settings = cfg.train_dataloader
    sampler = dict(type=TimedSampler, seconds=seconds)
    settings.update(num_workers=1, persistent_workers=False, batch_size=BATCH, pin_memory=False)
    settings.sampler = dict(type="DefaultSampler", shuffle=True)
    return seeded_loader(Runner.build_dataloader(settings, seed=0), sampler, seed=0)


def prepare(root: Path, count: int) -> int:
    """Write photographs, random tokens and squares; returns the bytes of an average file."""
    init_default_scope("mmpretrain")
    write_photographs(root / "images", count)
    files = sorted((root / "images").iterdir())
    names = [f"images/{file.name}" for file in files]
    store = TokenStore.create(
        root / "tokens", names, grid=14, vocab_size=8192, tokenizer="random", data_root=root
    )
    grids = np.random.default_rng(0).integers(8192, size=(count, 14, 14))
    store.write(np.arange(count), grids)
    store_images(SquareLoader.from_config(decoding_config(root)))
    return sum(file.stat().st_size for file in files) // count


def measure(row: str, root: Path, seconds: float) -> tuple[float, float]:
    """Images per CPU second of a loader's worker, and microseconds an image of this process."""
    cv2.setNumThreads(0)  # as MMEngine's runner does
    readings = []  # CPU seconds of the worker and of this process after each batch, while the worker is there
    for _ in build_loader(ROWS[row](root), seconds):
        if multiprocessing.active_children() or not readings:
            readings.append((workers_seconds(), time.process_time()))
    by_worker, by_this = (end - start for start, end in zip(readings[WARM_UP], readings[-1], strict=True))
    images = (len(readings) - 1 - WARM_UP) * BATCH
    return images / by_worker, 1e6 * by_this / images


def workers_seconds() -> float:
    """CPU seconds of this process's workers so far, in user code and in the kernel."""
    ticks = 0
    for worker in multiprocessing.active_children():
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS


def main() -> None:
    """Measure each loader in turns, and print the table."""
    args = read_arguments()
    rates = defaultdict(list)
    own = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        size = in_fresh_process(prepare, root, args.images, **ONE_THREAD)
        for _ in range(args.repeats):
            for row in ROWS:
                rate, microseconds = in_fresh_process(measure, row, root, args.seconds, **ONE_THREAD)
                rates[row].append(rate)
                own[row].append(microseconds)
    print(
        f"{machine()}; {args.images} photographs of {size / 1000:.0f} kB, medians of {args.repeats} repeats\n"
    )
    first = statistics.median(next(iter(rates.values())))
    lines = []
    for row in ROWS:
        rate = statistics.median(rates[row])
        microseconds = statistics.median(own[row])
        lines.append([row, f"{rate:,.0f}", f"{rate / first:.1f}", f"{microseconds:.0f}"])
    headings = ["one worker", "images per CPU second", "times decoding"]
    headings.append("us per image in the training process")
    print(table(headings, lines))


if __name__ == "__main__":
    sys.exit(main())
