"""Compute what the paper's recipes cost for ImageNet-1k, ImageNet-21k and 400 M images.

FLOPs are the package's own formulas and PyTorch's count of the encoder; a GPU is assumed to reach half its
dense rate, of bfloat16 and float16 for trainings and the encoder, of float32 for nearest centroids. Only the
rate of decoding is measured, in one thread of this machine.
"""

import sys
import tempfile
import time
from typing import NamedTuple

import numpy as np
import torch
from harness import ROOT, machine, table
from mmengine.dataset import Compose
from mmengine.registry import DefaultScope
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from mapet_mm.engine.runners.launch import read_config
from mapet_mm.models.target_generators.kclip import build_tower, grid_features
from mapet_mm.structures.store_files import PART_ROWS
from mapet_mm.structures.stored_names import HASH_STRIDE

sys.path.append(str(ROOT / "tools"))
from flops import complexity

IMAGES = {"ImageNet-1k": 1_281_167, "ImageNet-21k": 14_197_122, "400 M": 400_000_000}
RECIPES = {
    name: f"configs/mapet/mapet_vit-{name}-p16_kclip_{batch}-amp-coslr-300e_in1k.py"
    for name, batch in (("tiny", "16xb128"), ("small", "32xb64"), ("base", "64xb32"))
}
DECODED = 300


class Work(NamedTuple):
    """FLOPs in bfloat16 or float16, and in float32; of a GPU, those that it does in a second."""

    half: float
    float32: float = 0

    def seconds(self, gpu: "Work") -> float:
        """How long a GPU takes."""
        return self.half / gpu.half + self.float32 / gpu.float32

    def times(self, count: int) -> "Work":
        return Work(count * self.half, count * self.float32)


GPUS = {"A100": Work(312e12 / 2, 19.5e12 / 2), "H100": Work(989e12 / 2, 67e12 / 2)}
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


def main() -> None:
    """Print three tables: stages, GPUs, and stores."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        features = grid_features(build_tower("RN50x64", dict(type="random")), torch.empty(1, 3, 448, 448))
    encoder, options = counter.get_total_flops(), read_config(TOKENIZER).codebook
    product = 2 * options.k * features.shape[-1]  # of one feature with all centroids
    tokens = Work(encoder, features.shape[1] * product)  # of an image
    most = options.k * options.max_points_per_centroid
    models = {name: complexity(read_config(recipe)) for name, recipe in RECIPES.items()}
    rows = []
    for name, count in IMAGES.items():
        sampled = min(count, options.get("num_images") or count)
        passes = options.nredo * options.niter * min(most, options.positions_per_image * sampled)
        stages = {
            "sampling": Work(sampled * encoder),
            "k-means": Work(0, passes * product),
            "tokens": tokens.times(count),
            **{f"ViT-{size}, 300 epochs": Work(300 * count * 2 * cost.step) for size, cost in models.items()},
            "tokens in the model, 300 epochs": tokens.times(300 * count),
        }
        for stage, work in stages.items():
            hours = (f"{work.seconds(gpu) / 3600:,.1f}" for gpu in GPUS.values())
            rows.append([name, stage, f"{sum(work):.2e}", *hours])
    print(table(["computed", "stage", "FLOPs", *(f"hours of an {gpu}" for gpu in GPUS)], rows))

    decoded, rows = decoding_rate(), []
    costs = {"tokens": tokens, **{f"ViT-{size}": Work(2 * cost.step) for size, cost in models.items()}}
    for name, work in costs.items():
        wanted = [1 / work.seconds(gpu) for gpu in GPUS.values()]
        size = name.removeprefix("ViT-")
        sent = 4 * models[size].parameters / 1e6 if size in models else None  # gradients in float32, a ring
        sends = [f"{2 * (n - 1) / n * sent:,.0f}" if sent else "" for n in (8, 64)]
        cores = (f"{rate / decoded:.1f}" for rate in wanted)
        rows.append([name, f"{sum(work) / 1e9:,.1f}", *(f"{rate:,.0f}" for rate in wanted), *cores, *sends])
    print(f"\n{machine()}: a second of CPU decodes {decoded:,.0f} images\n")
    headings = [
        "GFLOPs an image",
        *(f"images/s, {gpu}" for gpu in GPUS),
        *(f"threads, {gpu}" for gpu in GPUS),
    ]
    print(table(["computed", *headings, "MB a step sends, 8 processes", "64 processes"], rows))

    rows = []
    for name, count in IMAGES.items():
        gigabytes = f"{count * ROW / 1e9:,.1f}", f"{count * NAME / 1e9:,.2f}"
        rows.append(
            [name, *gigabytes, f"{-(-count // PART_ROWS):,}", f"{8 * count / HASH_STRIDE / 1e6:,.1f}"]
        )
    print()
    print(table(["computed", "tokens, GB", "names, GB", "parts", "MB a worker keeps"], rows))


if __name__ == "__main__":
    main()
