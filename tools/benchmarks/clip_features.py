"""Images a second of a CLIP ResNet's features, in each precision and memory format, and from JPEG files.

    python tools/benchmarks/clip_features.py

Weights are random. First the network alone, on images that are on the device already; then with the loader of
an extraction before it, which decodes, resizes and crops.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from harness import DEVICE, ON_GPU, machine, table
from mmengine.registry import init_default_scope
from PIL import Image

from mapet_mm.registry import MODELS
from mapet_mm.tokenizers import KCLIP
from mapet_mm.tokenizers.fill import GROUP_SIZE, GroupLoader
from mapet_mm.tokenizers.images import NamedImages

FILES = 256  # which come again and again
WORKERS = min(14, max(1, (os.cpu_count() or 1) - 1))
NETWORKS = {"RN50": 224, "RN50x16": 384, "RN50x64": 448}
PRECISIONS = ("float32", "tf32", "float16")


def images_per_second(network: str, precision: str, layout: torch.memory_format, num_images: int) -> float:
    """Of four batches, after one that does not count."""
    tokenizer = KCLIP(network, pretrained=dict(type="random", seed=0), precision=precision).to(DEVICE).eval()
    tokenizer.network.to(memory_format=layout)
    side = NETWORKS[network]
    images = torch.randn(num_images, 3, side, side, device=DEVICE).to(memory_format=layout)
    with torch.no_grad():
        tokenizer.features(images)
        seconds = time_batches(tokenizer, images, 4 if ON_GPU else 1)
    return num_images / seconds


def time_batches(tokenizer: KCLIP, images: torch.Tensor, count: int) -> float:
    """Seconds of a batch."""
    if ON_GPU:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        tokenizer.features(images)
    if ON_GPU:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def write_files(folder: Path) -> None:
    """Write JPEG files of ImageNet's usual size: smooth noise, which is as long to decode as a photograph."""
    rng = np.random.default_rng(0)
    for number in range(FILES):
        noise = Image.fromarray(rng.integers(0, 256, (47, 63, 3), dtype=np.uint8))
        noise.resize((500, 375), Image.Resampling.BICUBIC).save(folder / f"{number:03}.jpg", quality=95)


def images_per_second_from_files(network: str, precision: str, num_groups: int, group_size: int) -> float:
    """The rate at which an extraction's groups come through its loader and the network."""
    side = NETWORKS[network]
    pipeline = [
        dict(type="LoadImageFromFile"),
        dict(type="ResizeEdge", scale=side, edge="short", backend="pillow", interpolation="bicubic"),
        dict(type="CenterCrop", crop_size=side),
        dict(type="PackInputs"),
    ]
    preprocessor = dict(type="SelfSupDataPreprocessor", mean=[122.77] * 3, std=[68.5] * 3, to_rgb=True)
    init_default_scope("mmpretrain")
    tokenizer = KCLIP(network, pretrained=dict(type="random", seed=0), precision=precision).to(DEVICE).eval()
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        dataset = dict(type="CustomDataset", data_root=folder, with_label=False, pipeline=pipeline)
        images = NamedImages(dataset, folder)
        loader = GroupLoader(images, side, MODELS.build(preprocessor).to(DEVICE), group_size, WORKERS)
        # The first groups, for which the workers have to start, do not count.
        num_first = 2 * WORKERS
        groups = []
        for number in range(num_first + num_groups):
            groups.append((number, np.arange(number * group_size, (number + 1) * group_size) % FILES))
        for number, group in enumerate(loader.load(groups)):
            if number == num_first:
                start = time.perf_counter()
            features = tokenizer.features(group.inputs)
        features.cpu()  # when the last group is done
        return (num_groups - 1) * group_size / (time.perf_counter() - start)


def main() -> None:
    """Print a row for each network and precision, as soon as it is measured, and one from files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=64, help="of a batch")
    parser.add_argument(
        "--dry-run", action="store_true", help="one image of the smallest network, in float32"
    )
    args = parser.parse_args()
    networks = ["RN50"] if args.dry_run else list(NETWORKS)
    precisions = ["float32"] if args.dry_run else PRECISIONS
    num_images = 1 if args.dry_run else args.images
    print(f"{machine()}; batches of {num_images}\n")
    print(
        table(["network", "precision", "images/s, channels first", "images/s, channels last"], []), flush=True
    )
    for network in networks:
        for precision in precisions:
            rates = []
            for layout in (torch.contiguous_format, torch.channels_last):
                try:
                    rates.append(f"{images_per_second(network, precision, layout, num_images):,.1f}")
                except Exception as error:  # the other rows are measured all the same
                    rates.append(type(error).__name__)
            print(f"| {network} | {precision} | {' | '.join(rates)} |", flush=True)

    network = networks[-1]
    precision = precisions[-1]
    num_groups, group_size = (2, 1) if args.dry_run else (128, GROUP_SIZE)
    alone = images_per_second(network, precision, torch.contiguous_format, group_size)
    rate = images_per_second_from_files(network, precision, num_groups, group_size)
    heading = f"{network}, {precision}, from JPEG files, {WORKERS} loader processes"
    print(f"\n{table([heading, 'images/s', '% of the network alone'], [])}")
    print(f"| groups of {group_size} | {rate:,.1f} | {100 * rate / alone:.0f} |", flush=True)


if __name__ == "__main__":
    main()
