"""Opening time, memory and rate of StoredImages for so many images, on synthetic tokens and squares.

Each number of images is measured in a process of its own, of one thread, with files in the page cache. Memory
is what the process alone holds (USS), less what it had before; of worker processes, each adds as much.
"""

import argparse
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from harness import in_fresh_process, machine, table
from tqdm import trange

from mapet_mm.datasets import StoredImages
from mapet_mm.structures import TokenStore
from mapet_mm.structures.squares import Squares

ROOT = "/data"
READS = 50_000
BATCH = 128


def name_of(row: int) -> str:
    return f"train/n{row // 1300:08d}/n{row // 1300:08d}_{row:08d}.JPEG"


def make(folder: Path, count: int, grid: int, size: int) -> None:
    """A store of so many images with tokens and squares, all alike."""
    names = list(map(name_of, range(count)))
    store = TokenStore.create(folder / "tokens", names, grid, 8192, "digest", ROOT)
    squares = Squares(store, size, [dict(type="LoadImageFromFile")])
    squares.begin()
    for part in trange(len(squares), desc=f"making {count:,} images", unit="part"):
        slots = range(len(squares.part_range(part)))
        for parts in (store.parts, squares):
            parts.update(part, slots, np.zeros((len(slots), *parts.shape), parts.dtype), {})
    squares.finish()


def own_bytes() -> int:
    """Memory that this process shares with no other (USS)."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * sum(map(int, re.findall(r"Private_(?:Clean|Dirty):\s+(\d+)", rollup)))


def per_second(read: Callable[[int], object], rows: np.ndarray) -> float:
    """Calls in a second of CPU time."""
    start = time.process_time()
    for row in rows.tolist():
        read(row)
    return len(rows) / (time.process_time() - start)


def measure(folder: Path, size: int) -> tuple[float, ...]:
    """Milliseconds to open, MB in memory, and look-ups of tokens by row and by name, and images a second."""
    before = own_bytes()
    start = time.perf_counter()
    dataset = StoredImages(str(folder / "tokens"), size=size)
    opened = time.perf_counter() - start
    rows = np.random.default_rng(0).integers(len(dataset), size=READS)
    grid = np.empty(dataset.store.grid, dataset.store.dtype)
    parts = dataset.store.parts
    per_second(lambda row: parts.read_row(row, grid), rows)  # opens the parts
    by_row = per_second(lambda row: parts.read_row(row, grid), rows)
    few = rows[:: READS // 5000]
    by_name = per_second(lambda row: dataset.store[name_of(row)], few)
    batches = few[: len(few) // BATCH * BATCH].reshape(-1, BATCH)
    for batch in batches.tolist():
        dataset.__getitems__(batch)
    start = time.process_time()
    for batch in batches.tolist():
        dataset.__getitems__(batch)
    images = batches.size / (time.process_time() - start)
    used = own_bytes() - before
    return 1e3 * opened, used / 1e6, by_row, by_name, images


def main() -> None:
    """Make, measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, nargs="+", default=[1_281_167], help="numbers of images")
    parser.add_argument("--grid", type=int, default=14, help="tokens per side")
    parser.add_argument("--size", type=int, default=4, help="side of a square in pixels (224: 154 MB a part)")
    args = parser.parse_args()
    rows = []
    for count in args.images:
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder), count, args.grid, args.size)
            opened, used, *rates = in_fresh_process(measure, Path(folder), args.size, OMP_NUM_THREADS="1")
            rows.append([f"{count:,}", f"{opened:.1f}", f"{used:.1f}", *(f"{rate:,.0f}" for rate in rates)])
    print(f"{machine()}\n")
    headings = ["images", "open, ms", "own, MB", "token grids/s by row", "by name", "images/s in batches"]
    print(table(headings, rows))


if __name__ == "__main__":
    main()
