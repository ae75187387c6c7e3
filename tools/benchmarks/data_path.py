"""Bytes and milliseconds per image that the pre-training loader spends on tokens, besides the pixels.

Ours is the pipeline of configs/_base_/datasets/imagenet_tokens.py on JPEG files of scikit-image's
photographs; the cost of tokens is the difference between the pipeline with and without them. The reference's
loader makes the two float masks of Section 4.1 for each image, vectorised. A second table has the steps that
make the pixels.
"""

import pickle
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, count
from pathlib import Path

import numpy as np
from harness import ROOT, machine, parse_options, report, time_in_turns
from mmengine.config import Config
from mmengine.dataset import default_collate
from mmengine.registry import init_default_scope
from mmpretrain.registry import TRANSFORMS
from PIL import Image
from skimage import data as photographs

from mapet_mm.models.utils.data_preprocessor import TokenGridDataPreprocessor
from mapet_mm.structures.store import TokenStore

PHOTOGRAPHS = ("astronaut", "cat", "coffee", "rocket", "retina")
NUM_TOKENS, CUTTING_POINT = 197, 50
COPIES = 200  # of each photograph in the store, so that look-ups do not repeat


def write_photographs(folder: Path) -> list[str]:
    """Write JPEG files with a longer side of 500 px and their token store; returns the paths."""
    names = []
    for name in PHOTOGRAPHS:
        image = Image.fromarray(getattr(photographs, name)())
        image.thumbnail((500, 500))
        for copy in range(COPIES):
            (folder / "train").mkdir(exist_ok=True)
            names.append(f"train/{name}_{copy}.jpg")
            image.save(folder / names[-1], quality=95)
    store = TokenStore.create(folder / "tokens", sorted(names), (14, 14), 8192, "random", str(folder))
    ids = np.random.default_rng(0).integers(8192, size=(len(names), 14, 14))
    store.write(np.arange(len(names)), ids)
    store.seal()
    return [str(folder / name) for name in names]


def reference_masks(rank: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Content and query masks of one image, float32, tokens in raster order (see tests/naive_two_stream)."""
    targets = np.flatnonzero(rank >= CUTTING_POINT)
    later, place = rank[targets], rank[:, None]
    context = rank < CUTTING_POINT
    to_tokens = np.where(place >= CUTTING_POINT, rank[None] <= place, context[None])
    to_masks = np.where(place >= CUTTING_POINT, later[None] > place, True)
    of_tokens = np.concatenate([to_tokens, to_masks], axis=1)
    of_masks = np.concatenate([context, np.ones(len(targets), dtype=bool)])[None].repeat(len(targets), 0)
    content = np.concatenate([of_tokens, of_masks])
    query = np.concatenate([rank[None] < later[:, None], later[None] >= later[:, None]], axis=1)
    return tuple(np.where(sees, np.float32(0), np.float32("-inf")) for sees in (content, query))


def milliseconds(calls: dict[str, Callable[[int], object]], images: int) -> dict[str, float]:
    """Median time of each call over the images, in turns."""
    numbers = {name: count() for name in calls}
    turns = {name: lambda name=name: calls[name](next(numbers[name])) for name in calls}
    taken = time_in_turns(turns, images, images // 10)
    return {name: 1000 * statistics.median(of) for name, of in taken.items()}


def measure_tokens(
    load: Callable, pack: Callable, image: dict, paths: list[str], images: int
) -> list[list[str]]:
    """Rows of the table: bytes and milliseconds besides the pixels, ours and the reference's."""

    def with_tokens(number: int) -> dict:
        return pack(load({**image, "img_path": paths[number * 7 % len(paths)]}))

    def without(number: int) -> dict:
        return pack({**image, "img_path": paths[number * 7 % len(paths)]})

    generator = np.random.default_rng(0)

    def masks(_: int) -> tuple[np.ndarray, np.ndarray]:
        order = np.concatenate([[0], 1 + generator.permutation(NUM_TOKENS - 1)])
        return reference_masks(order.argsort())

    batch = default_collate([with_tokens(number) for number in range(32)])
    preprocessor = TokenGridDataPreprocessor()
    stacking = milliseconds({"stack": lambda _: preprocessor(batch)}, 20)["stack"]
    plain = milliseconds(
        {"stack": lambda _: TokenGridDataPreprocessor.__base__.forward(preprocessor, batch)}, 20
    )
    times = milliseconds({"with": with_tokens, "without": without, "masks": masks}, images)
    ours = times["with"] - times["without"] + max(0.0, stacking - plain["stack"]) / 32
    pixels = image["img"].nbytes
    beside = len(pickle.dumps(with_tokens(0))) - pixels - 196 * 8
    reference = sum(mask.nbytes for mask in masks(0))
    return [
        ["ours, tokens included", f"{beside:,}", f"{ours:.3f}"],
        ["reference's masks", f"{reference:,}", f"{times['masks']:.3f}"],
        ["reference : ours", f"{reference / beside:.0f}", f"{times['masks'] / ours:.0f}"],
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print both tables."""
    args = parse_options(__doc__, arguments, images=300)
    init_default_scope("mmpretrain")
    cfg = Config.fromfile(ROOT / "configs/_base_/datasets/imagenet_tokens_kclip.py")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        paths = write_photographs(folder)
        steps = [dict(step) for step in cfg.train_pipeline]
        next(step for step in steps if "store" in step)["store"] = str(folder / "tokens")
        pipeline = [TRANSFORMS.build(step) for step in steps]
        *pixels, load, pack = pipeline
        # The input of each step, for one image.
        given = [*accumulate(pixels, lambda results, step: step(results), initial={"img_path": paths[0]})]
        rows = measure_tokens(load, pack, given[-1], paths, args.images)
        headings = ["an image, beside its pixels", "bytes beside tokens", "ms"]
        report(f"{args.images} images; {machine()}", headings, rows)
        calls = {
            type(step).__name__: partial(on_copy, step, results)
            for step, results in zip(pixels, given, strict=False)
        }
        times = [[name, f"{ms:.3f}"] for name, ms in milliseconds(calls, args.images).items()]
        report("The steps that make the pixels", ["step", "ms an image"], times)


def on_copy(step: Callable[[dict], dict], results: dict, number: int) -> dict:
    return step(dict(results))


if __name__ == "__main__":
    main()
