"""A token store of ImageNet's size: opening, random look-ups, memory of a worker, bytes on disk."""

import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from harness import machine, parse_options, report

from mapet_mm.tokenizers import TokenStore

GRID = (14, 14)
WRITTEN_AT_A_TIME = 8192


def name_of(index: int) -> str:
    """A name like those of ImageNet's training images."""
    return f"train/n{index % 1000:08d}/n{index % 1000:08d}_{index // 1000}.JPEG"


def make_store(path: Path, images: int) -> None:
    """Create, fill with random ids, and seal."""
    store = TokenStore.create(
        path, sorted(map(name_of, range(images))), GRID, 8192, "0" * 64, "data/imagenet"
    )
    rng = np.random.default_rng(0)
    for start in range(0, images, WRITTEN_AT_A_TIME):
        rows = np.arange(start, min(start + WRITTEN_AT_A_TIME, images))
        store.write(rows, rng.integers(8192, size=(len(rows), *GRID), dtype=np.uint16))
    store.seal()


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def look_up(path: Path, images: int, lookups: int, results: multiprocessing.Queue) -> None:
    """In a worker: open, look up random images, and report seconds to open, look-ups/s and added memory."""
    names = [name_of(index) for index in random.Random(0).choices(range(images), k=lookups)]
    before = resident_bytes()
    start = time.perf_counter()
    store = TokenStore.open(path)
    first = store[names[0]]
    opened = time.perf_counter()
    for name in names:
        store[name]
    seconds = time.perf_counter() - opened
    assert first.shape == GRID
    results.put((opened - start, lookups / seconds, resident_bytes() - before))


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the store and measure it in a fresh worker."""
    args = parse_options(__doc__, arguments, images=1_300_000, lookups=300_000, folder="")
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(args.folder or temporary, "tokens")
        make_store(path, args.images)
        sizes = {file.name: file.stat().st_size for file in path.rglob("*.safetensors")}
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        worker = context.Process(target=look_up, args=(path, args.images, args.lookups, results))
        worker.start()
        worker.join()
        seconds, rate, memory = results.get()
    names = sum(len(name_of(index)) + 1 for index in range(args.images))
    other = sum(sizes.values()) - sizes["grids.safetensors"] - names
    rows = [
        ["opening and the first look-up", f"{seconds * 1e3:.1f} ms"],
        ["random look-ups, one process", f"{rate:,.0f}/s"],
        ["resident memory of a worker", f"{memory / 1e6:.1f} MB"],
        ["bytes a token", f"{sizes['grids.safetensors'] / args.images / np.prod(GRID):.3f}"],
        ["bytes an image beside tokens and name", f"{other / args.images:.3f}"],
    ]
    report(f"{args.images} images, {GRID[0]} x {GRID[1]} tokens; {machine()}", ["", "measured"], rows)
    sys.exit(not (seconds < 0.1 and memory < 10e6 and rate > 1e5))


if __name__ == "__main__":
    main()
