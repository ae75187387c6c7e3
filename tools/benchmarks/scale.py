"""Time and memory of whatever takes an image, a name, a row or a file, for 100,000 to 5 M of them.

Names are synthetic and files empty; loading and the tokenizer cost nothing. Each case runs in a fresh process
of one thread. Times are CPU seconds, so that other work on the machine counts little. "Silent" is the longest
time without a sign on the terminal. The peak is the whole process's; "own" is without the libraries' files.
"""

import argparse
import os
import pickle
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from harness import forget_peak, in_fresh_process, machine, peak, table
from mmengine.dataset import BaseDataset

from mapet_mm.cli.choices import choose
from mapet_mm.datasets.transforms.token_grid import LoadTokenGrid
from mapet_mm.engine.hooks.class_names_check_hook import check_class_order
from mapet_mm.engine.hooks.token_store_check_hook import TokenStoreCheckHook
from mapet_mm.evaluation.features import FeatureBank
from mapet_mm.evaluation.images import ImageSet
from mapet_mm.evaluation.metrics.neighbours import COLUMNS, knn_votes
from mapet_mm.models.target_generators.precomputed_tokens import PrecomputedTokens
from mapet_mm.structures import TokenStore
from mapet_mm.tokenizers.features import draw_images, sample_features
from mapet_mm.tokenizers.fill import GROUP_SIZE, ImageGroup
from mapet_mm.tokenizers.images import NamedImages
from mapet_mm.tokenizers.tokens import extract_tokens, open_or_create

SIZES = (100_000, 1_281_167, 5_000_000)
LARGEST = SIZES[1]  # where files, or a matrix of features, are made
QUERIES, DIM, CLASSES = 5_000, 768, 1_000  # of k-NN


class Names(BaseDataset):
    """A dataset of so many paths, as MMEngine holds it once it is read."""

    def full_init(self) -> None:
        infos = bytearray()
        for number in range(int(self.ann_file)):
            infos += pickle.dumps({"img_path": path(number), "gt_label": 0})
        self.data_bytes = np.frombuffer(infos, np.uint8)
        self.data_address = np.arange(1, int(self.ann_file) + 1) * (len(infos) // int(self.ann_file))
        self._fully_initialized = True


class Free:
    """A loader and a tokenizer that cost nothing."""

    group_size, precision = GROUP_SIZE, "float32"
    grid, vocab_size, digest, dim, metadata = (14, 14), 8192, "ab" * 32, 8, {}

    def __init__(self, images: NamedImages) -> None:
        self.images = images

    def load(self, groups):
        for block, places in groups:
            yield ImageGroup(block, list(places), torch.zeros(len(places), 1), {})

    def __call__(self, inputs):
        return torch.zeros(len(inputs), 196, dtype=torch.int64)

    def features(self, inputs):
        return torch.zeros(len(inputs), 196, self.dim)


def path(number: int) -> str:
    return f"/data/n{number // 1300:08d}/n{number // 1300:08d}_{number:07d}.JPEG"


def cases(count: int, folder: Path, held: int) -> dict[str, Callable[[], object]]:
    """The measurements, by the title in the table; later ones use the store that the extraction makes.

    A dataset of so many images is `held` in memory.
    """
    images = NamedImages(dict(type=Names, ann_file=str(held), pipeline=[]), "/data")
    free, (names,) = Free(images), images._datasets
    names.pipeline.transforms.append(LoadTokenGrid(str(folder / "tokens")))
    model = torch.nn.Module()
    model.target_generator = PrecomputedTokens(free.vocab_size)
    runner = SimpleNamespace(
        iter=0, model=model, train_dataloader=SimpleNamespace(dataset=names), val_loop=None
    )
    options = SimpleNamespace(
        images=folder / "images", arch="tiny", tokenizer="random", init=None, epochs=300, batch_size=64
    )

    def extract() -> None:
        extract_tokens(free, free, *open_or_create(folder / "tokens", free, images, {}))

    def read() -> ImageSet:
        dataset = dict(type="mmpretrain.CustomDataset", data_root=str(folder / "images"))
        return ImageSet("train", dict(dataset=dataset))

    def evaluate() -> None:
        found = read()
        bank = FeatureBank(folder, found, layers=["1"], poolings=["mean"], dim=DIM, grid=(14, 14))
        print(found.digest, bank.missing("1"))

    def neighbours(predict: Callable) -> None:
        known = torch.randn(COLUMNS, DIM).repeat(-(-count // COLUMNS), 1)[:count]
        parts = zip(known.split(COLUMNS), (torch.arange(count) % CLASSES).split(COLUMNS), strict=True)
        predict(torch.randn(QUERIES, DIM), parts, CLASSES)

    def products(queries, known, classes) -> None:
        for keys, _ in known:
            queries @ keys.T

    return {
        "folder: look of `mapet-mm pretrain`": lambda: choose(options),
        "folder: read by MMPretrain's CustomDataset": read,
        "folder: set-up of `evaluate_features`, with that": evaluate,
        "codebook: choice of images and positions": lambda: sample_features(
            free, free, *draw_images(*images.distinct_names(), None, 0), folder / "features", {}
        ),
        "extraction": extract,
        "extraction, again": extract,
        "store: open, look an image up": lambda: TokenStore.open(folder / "tokens")[path(count // 2)[6:]],
        "store: verify": lambda: TokenStore.open(folder / "tokens").verify(),
        "check before a training": lambda: TokenStoreCheckHook(alignment=False).before_train(runner),
        "class names of two sets": lambda: check_class_order(
            *(list(map(path, range(count))) for _ in range(2)), "training", "validation"
        ),
        "k-NN": lambda: neighbours(knn_votes),
        "k-NN, its products alone": lambda: neighbours(products),
    }


def measure(title: str, count: int, folder: Path) -> tuple[float, ...]:
    """Seconds, the longest silence, the peak in GB, and the process's own part of it."""
    measured = cases(count, folder, 1 if title.startswith(("folder", "class", "k-NN")) else count)
    forget_peak()
    signs = [time.process_time()]
    sys.stderr = SimpleNamespace(write=lambda text: signs.append(time.process_time()), flush=lambda: None)
    measured[title]()
    signs.append(time.process_time())
    shared = 1024 * int(re.search(r"RssFile:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    return signs[-1] - signs[0], max(np.diff(signs)), peak() / 1e9, (peak() - shared) / 1e9


def main() -> None:
    """Measure each case in a fresh process, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of images")
    parser.add_argument("--cases", default="", help="only those whose titles match this expression")
    args = parser.parse_args()
    rows = []
    for count in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            titles = [title for title in cases(1, Path(folder), 1) if re.search(args.cases, title)]
            if count > LARGEST:
                titles = [title for title in titles if title.startswith("extraction")]
            for number in range(count if any(title.startswith("folder") for title in titles) else 0):
                file = folder + "/images" + path(number)[5:]
                if not number % 1300:
                    os.makedirs(os.path.dirname(file))
                os.mknod(file)
            for title in titles:
                found = in_fresh_process(measure, title, count, Path(folder), OMP_NUM_THREADS="1")
                seconds, *others = (f"{one:.2f}" for one in found)
                rows.append([f"{title}; {count:,}", seconds, f"{1e6 * found[0] / count:.1f}", *others])
                print(" ".join(rows[-1]), file=sys.stderr)
    print(f"{machine()}\n")
    headings = ["case; images", "s", "us an image", "silent, s", "peak, GB", "own, GB"]
    print(table(headings, rows))


if __name__ == "__main__":
    main()
