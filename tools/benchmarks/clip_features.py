"""Images a second of a CLIP ResNet's features, in each precision and memory format.

    python tools/benchmarks/clip_features.py

The network alone, with random weights, on images that are on the device already.
"""

import argparse
import time

import torch
from harness import DEVICE, ON_GPU, machine, table

from mapet_mm.tokenizers import KCLIP

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


def main() -> None:
    """Print a row for each network and precision, as soon as it is measured."""
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


if __name__ == "__main__":
    main()
