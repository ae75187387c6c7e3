"""What the pre-training loader spends on an image beside pixels, in bytes and milliseconds.

Ours is the pipeline of configs/_base_/datasets/imagenet_tokens.py on JPEG files of scikit-image's
photographs; what tokens cost is what it takes with them more than without. The reference's loader makes the
two float masks of Section 4.1 for each image, vectorised. Below: the pipeline's steps, and resize and jitter
by other backends.
"""

import argparse
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import default_collate
from mmengine.registry import init_default_scope
from mmpretrain.registry import TRANSFORMS
from PIL import Image
from skimage import data as photographs
from torchvision.transforms import v2

from mapet_mm.benchmark import machine, table
from mapet_mm.datasets.preprocessor import TokenGridDataPreprocessor
from mapet_mm.tokenizers.store import TokenStore

ROOT = Path(__file__).parents[2]
PHOTOGRAPHS = ("astronaut", "cat", "coffee", "rocket", "retina")
NUM_TOKENS, CUTTING_POINT = 197, 50
COPIES = 200  # of every photograph in the token store, so that look-ups do not repeat


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=300, help="images of each measurement")
    return parser.parse_args()


def write_photographs(folder: Path) -> list[str]:
    """JPEG files of 500 px on the longer side, like ImageNet's, and their token store; returns the paths."""
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
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(images):
        for name, call in calls.items():
            start = time.perf_counter()
            call(number)
            taken[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(of[images // 10 :]) for name, of in taken.items()}


def chain(pipeline: list, results: dict) -> dict:
    for step in pipeline:
        results = step(results)
    return results


def measure_steps(pipeline: list, paths: list[str], images: int) -> dict[str, float]:
    """Milliseconds of each step of the pipeline."""
    spent: dict[str, list[float]] = {type(step).__name__: [] for step in pipeline}
    for number in range(images):
        results = {"img_path": paths[number * 7 % len(paths)]}
        for step in pipeline:
            start = time.perf_counter()
            results = step(results)
            spent[type(step).__name__].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(of[images // 10 :]) for name, of in spent.items()}


def measure_tokens(
    load: Callable, pack: Callable, image: dict, paths: list[str], images: int
) -> list[list[str]]:
    """Rows of the table: ours and the reference's bytes and milliseconds beside pixels."""

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


class TorchvisionCrop:
    """The same crop by torchvision's resize of uint8 tensors, on vector units."""

    def __call__(self, results: dict) -> dict:
        image = torch.from_numpy(results["img"]).permute(2, 0, 1)
        square = v2.functional.center_crop(image, [min(image.shape[1:])] * 2)
        made = v2.functional.resize(square, [224, 224], v2.InterpolationMode.BICUBIC, antialias=True)
        return {**results, "img": made.permute(1, 2, 0).numpy()}


class TorchvisionJitter:
    """The same jitter by torchvision on uint8 tensors."""

    def __init__(self) -> None:
        self.jitter = v2.ColorJitter(0.4, 0.4, 0.4)

    def __call__(self, results: dict) -> dict:
        made = self.jitter(torch.from_numpy(results["img"]).permute(2, 0, 1).flip(0))
        return {**results, "img": made.flip(0).permute(1, 2, 0).numpy()}


def measure_backends(paths: list[str], images: int) -> list[list[str]]:
    """Rows of the table: crop and jitter by each backend, and how far the pixels are from the recipe's."""
    decoded = [np.asarray(Image.open(path))[..., ::-1].copy() for path in paths[::COPIES]]
    squares = [image[:224, :224].copy() for image in decoded]
    crop = dict(type="EfficientNetCenterCrop", crop_size=224, crop_padding=0, interpolation="bicubic")
    jitter = dict(type="ColorJitter", brightness=0.4, contrast=0.4, saturation=0.4)
    rows = []
    for name, step, sources, other in (
        ("crop and resize", crop, decoded, TorchvisionCrop()),
        ("colour jitter", jitter, squares, TorchvisionJitter()),
    ):
        built = {backend: TRANSFORMS.build({**step, "backend": backend}) for backend in ("pillow", "cv2")}
        built["torchvision v2"] = other
        calls = {backend: partial(on_image, transform, sources) for backend, transform in built.items()}
        times = milliseconds(calls, images)
        made = {backend: calls[backend](0) for backend in built} if step is crop else {}
        for backend, spent in times.items():
            # Jitter is random: only a crop can be compared.
            distance = np.abs(made[backend] - made["pillow"]) if made else None
            figures = ["", ""] if distance is None else [f"{distance.mean():.2f}", f"{distance.max()}"]
            rows.append([f"{name}, {backend}", f"{spent:.3f}", *figures])
    return rows


def on_image(transform: Callable[[dict], dict], sources: list[np.ndarray], number: int) -> np.ndarray:
    image = sources[number % len(sources)]
    return transform({"img": image, "img_shape": image.shape[:2]})["img"].astype(int)


def main() -> None:
    """Measure and print three tables."""
    args = parse_args()
    init_default_scope("mmpretrain")
    cfg = Config.fromfile(ROOT / "configs/_base_/datasets/imagenet_tokens_kclip.py")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        paths = write_photographs(folder)
        steps = [dict(step) for step in cfg.train_pipeline]
        next(step for step in steps if "store" in step)["store"] = str(folder / "tokens")
        pipeline = [TRANSFORMS.build(step) for step in steps]
        *pixels, load, pack = pipeline
        image = chain(pixels, {"img_path": paths[0]})
        print(f"{machine()}\n")
        rows = measure_tokens(load, pack, image, paths, args.images)
        print(table(["an image, beside its pixels", "bytes beside tokens", "ms"], rows))
        measured = measure_steps(pipeline, paths, args.images)
        print("\n" + table(["step", "ms an image"], [[name, f"{ms:.3f}"] for name, ms in measured.items()]))
        headings = ["step, backend", "ms an image", "mean distance to pillow's (0-255)", "largest"]
        print("\n" + table(headings, measure_backends(paths, args.images)))


if __name__ == "__main__":
    main()
