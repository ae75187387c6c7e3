"""Compute what the paper's recipes cost at least for ImageNet-1k, ImageNet-21k and 400 M images.

A step takes at least as long as its arithmetic at a GPU's full rate, as its bytes at the full bandwidth, and
as its launches. FLOPs are the package's own formulas and PyTorch's count of the encoder; bytes and launches
are counted on tensors of true sizes without values (`tools/step_counts.py`). Only the rate of decoding is
measured, in one thread of this machine.
"""

import sys
import tempfile
import time
from dataclasses import dataclass

import numpy as np
import torch
from harness import ROOT, machine, table, transposed
from mmengine.dataset import Compose
from mmengine.registry import DefaultScope
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from mapet_mm.engine.runners.launch import read_config
from mapet_mm.models.target_generators.kclip import build_tower, grid_features
from mapet_mm.structures.names import HASH_STRIDE
from mapet_mm.structures.token_store import PART_ROWS

sys.path.append(str(ROOT / "tools"))
from flops import complexity
from step_counts import count_step

IMAGES = {"ImageNet-1k": 1_281_167, "ImageNet-21k": 14_197_122, "400 M": 400_000_000}


@dataclass
class Gpu:
    """What a maker states: dense FLOPs a second, of bfloat16 and float16 and of float32; bytes a second."""

    half: float
    float32: float
    bandwidth: float


GPUS = {"A100": Gpu(312e12, 19.5e12, 2.0e12), "H100": Gpu(989e12, 67e12, 3.35e12)}
LAUNCH = 5e-6  # seconds of the host for an operation, assumed
BATCH = 256  # images on a GPU
RECIPES = {
    name: f"configs/mapet/mapet_vit-{name}-p16_kclip_{batch}-amp-coslr-300e_in1k.py"
    for name, batch in (("tiny", "16xb128"), ("small", "32xb64"), ("base", "64xb32"))
}
DECODED = 300
TOKENIZER = "configs/tokenizers/kclip_rn50x64-448px_k8192_in1k.py"
ROW = 2 * 14**2 + 1 + 8  # bytes: ids, state, hash of the name
NAME = len("n01440764/n01440764_10026.JPEG") + 8 + 8 + 4  # bytes: text, its end, sorted hash, its row


def decoding_rate() -> float:
    """Images that a thread loads, crops and jitters in a second of CPU: smooth noise as JPEG, 500 x 375."""
    noise = np.random.default_rng(0).integers(0, 256, (47, 63, 3), dtype=np.uint8)
    cfg = read_config(RECIPES["base"])
    with (
        tempfile.NamedTemporaryFile(suffix=".JPEG") as file,
        DefaultScope.overwrite_default_scope("mmpretrain"),
    ):
        Image.fromarray(noise).resize((500, 375), Image.Resampling.BICUBIC).save(file.name, quality=95)
        steps = Compose([*cfg.load_square, cfg.color_jitter, dict(type="PackInputs")])
        start = time.process_time()
        for _ in range(DECODED):
            steps(dict(img_path=file.name))
        return DECODED / (time.process_time() - start)


@dataclass
class Step:
    """What a training step of `BATCH` images computes, moves and launches."""

    flops: float
    moved: float
    launches: int
    peak: float

    def milliseconds(self, gpu: Gpu) -> list[float]:
        """By arithmetic, by bytes and by launches; the step takes at least the longest."""
        seconds = self.flops / gpu.half, self.moved / gpu.bandwidth, self.launches * LAUNCH
        return [1000 * one for one in seconds]

    def images_a_second(self, gpu: Gpu) -> float:
        """At most so many."""
        return 1000 * BATCH / max(self.milliseconds(gpu))


def steps_of_recipes() -> dict[str, Step]:
    """The training step of each size, by its recipe."""
    steps = {}
    for size, recipe in RECIPES.items():
        cfg = read_config(recipe)
        with FakeTensorMode(), torch.device("cpu"):
            counts = count_step(cfg, BATCH)
        flops = 2 * complexity(cfg).step * BATCH
        steps[size] = Step(flops, counts.moved, counts.operations.total(), counts.peak)
    return steps


def step_table(steps: dict[str, Step]) -> str:
    """What bounds a step."""
    rows = []
    for size, step in steps.items():
        row = [f"ViT-{size}", f"{step.flops / 1e12:.1f}", f"{step.moved / 1e9:.0f}", f"{step.launches:,}"]
        row.append(f"{step.peak / 1e9:.1f}")
        for gpu in GPUS.values():
            row += [" / ".join(f"{one:.0f}" for one in step.milliseconds(gpu))]
            row += [f"{step.images_a_second(gpu):,.0f}"]
        rows.append(row)
    headings = [f"computed, {BATCH} images", "TFLOPs", "GB moved", "launches", "GB at most in use"]
    for gpu in GPUS:
        headings += [f"ms on an {gpu}: arithmetic / bytes / launches", f"images/s of an {gpu}, at most"]
    return transposed(headings, rows)


@dataclass
class Work:
    """FLOPs in half precision and in float32."""

    half: float = 0
    float32: float = 0

    def hours(self, gpu: Gpu) -> float:
        """At least so many."""
        return (self.half / gpu.half + self.float32 / gpu.float32) / 3600


def hours_table(steps: dict[str, Step], encoder: float, nearest: float, kmeans: dict[str, float]) -> str:
    """Hours that each stage takes at least.

    Args:
        steps: by size.
        encoder: FLOPs of CLIP for an image.
        nearest: FLOPs of the search for an image's nearest centroids, which is in float32, as k-means is.
        kmeans: FLOPs by data set.
    """
    rows = []
    for name, count in IMAGES.items():
        stages = {
            "sampling, float16": Work(half=count * encoder),
            "sampling, float32": Work(float32=count * encoder),
            "k-means": Work(float32=kmeans[name]),
            "tokens, float16": Work(count * encoder, count * nearest),
            "tokens, float32": Work(float32=count * (encoder + nearest)),
            "tokens in the model, 300 epochs, float16": Work(300 * count * encoder, 300 * count * nearest),
        }
        for stage, work in stages.items():
            rows.append([f"{name}: {stage}", *(f"{work.hours(gpu):,.1f}" for gpu in GPUS.values())])
        for size, step in steps.items():
            hours = (300 * count / step.images_a_second(gpu) / 3600 for gpu in GPUS.values())
            rows.append([f"{name}: ViT-{size}, 300 epochs, eager", *(f"{one:,.1f}" for one in hours)])
    return table(["computed", *(f"hours of an {gpu}, at least" for gpu in GPUS)], rows)


def loader_table(steps: dict[str, Step], models: dict, decoded: float) -> str:
    """Threads that keep a GPU busy, and what a step sends: gradients in float32, by a ring."""
    rows = []
    for size, step in steps.items():
        threads = [f"{step.images_a_second(gpu) / decoded:.1f}" for gpu in GPUS.values()]
        sent = 4 * models[size].parameters / 1e6
        sends = [f"{2 * (n - 1) / n * sent:,.0f}" for n in (8, 64)]
        rows.append([f"ViT-{size}", *threads, *sends])
    threads = [f"threads for an {gpu}, at most" for gpu in GPUS]
    return table(["computed", *threads, "MB a step sends, 8 processes", "64 processes"], rows)


def store_table() -> str:
    """What a token store takes."""
    rows = []
    for name, count in IMAGES.items():
        gigabytes = f"{count * ROW / 1e9:,.1f}", f"{count * NAME / 1e9:,.2f}"
        parts = f"{-(-count // PART_ROWS):,}"
        rows.append([name, *gigabytes, parts, f"{8 * count / HASH_STRIDE / 1e6:,.1f}"])
    return table(["computed", "tokens, GB", "names, GB", "parts", "MB a worker keeps"], rows)


def main() -> None:
    """Print four tables: steps, hours, loaders and stores."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        features = grid_features(build_tower("RN50x64", dict(type="random")), torch.empty(1, 3, 448, 448))
    encoder = counter.get_total_flops()
    options = read_config(TOKENIZER).codebook
    product = 2 * options.k * features.shape[-1]  # of one feature with all centroids
    most = options.k * options.max_points_per_centroid
    kmeans = {}
    for name, count in IMAGES.items():
        images = min(count, options.get("num_images") or count)
        rows = min(most, options.positions_per_image * images)
        kmeans[name] = options.nredo * options.niter * rows * product

    steps = steps_of_recipes()
    print(step_table(steps), end="\n\n")
    print(hours_table(steps, encoder, features.shape[1] * product, kmeans), end="\n\n")
    decoded = decoding_rate()
    print(f"{machine()}: a second of CPU decodes {decoded:,.0f} images\n")
    models = {size: complexity(read_config(recipe)) for size, recipe in RECIPES.items()}
    print(loader_table(steps, models, decoded), end="\n\n")
    print(store_table())


if __name__ == "__main__":
    main()
