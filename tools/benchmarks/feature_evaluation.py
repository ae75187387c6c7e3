"""Memory, time and disk space of a frozen evaluation, on made-up features of ViT-B's width.

All blocks are hard links to one file, so they take 12 MB on disk, but as much is read as from separate files.
Times are those of the protocols: no image is read and no backbone runs.
"""

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

from mapet_mm.benchmark import machine, table
from mapet_mm.evaluation.features import BLOCK, CachedFeatures, bytes_per_image
from mapet_mm.evaluation.protocol import Evaluated
from mapet_mm.evaluation.protocols.knn import NearestNeighbours
from mapet_mm.evaluation.protocols.linear import LinearProbes
from mapet_mm.evaluation.protocols.low_shot import LowShot


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=200_000)
    parser.add_argument("--val-images", type=int, default=2_000)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--rates", type=int, default=1, help="learning rates of the linear probes")
    return parser.parse_args()


def make_features(folder: Path, name: str, size: int, args: argparse.Namespace) -> CachedFeatures:
    """Make features of `size` images, with identical blocks."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(BLOCK) % args.classes
    values = torch.randn(2, args.layers, BLOCK, args.dim, generator=generator)
    values += torch.randn(args.classes, args.dim, generator=generator)[labels] / 4
    known = dict(layers=[str(number + 1) for number in range(args.layers)], dim=args.dim, grid=(14, 14))
    features = CachedFeatures(
        folder / name,
        name=name,
        poolings=["class token", "mean"],
        size=size,
        labels=labels.repeat(-(-size // BLOCK))[:size],
        **known,
    )
    first = features.path("pooled", 0)
    first.parent.mkdir(parents=True)
    save_file({"pooled": values.half()}, first)
    for block in range(1, features.num_blocks):
        os.link(first, features.path("pooled", block))
    return features


def peak_gib() -> float:
    """Peak memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    """Measure and print."""
    args = parse_args()
    before, lines = peak_gib(), []
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"train": args.images - args.images % BLOCK, "val": args.val_images - args.val_images % BLOCK}
        features = {name: make_features(Path(folder), name, size, args) for name, size in sizes.items()}
        images = {
            n: SimpleNamespace(name=n, labels=one.labels, class_names=None) for n, one in features.items()
        }
        evaluated = Evaluated(None, features, images, torch.device("cpu"))
        rates = [0.1 / 2**number for number in range(args.rates)]
        probes = LinearProbes(rates=rates, epochs=1, least_steps=1, batch_size=1024)
        for protocol in (NearestNeighbours(), LowShot(shots=[10, 0.01], draws=1), probes):
            start = time.perf_counter()
            protocol.run(evaluated)
            lines.append([type(protocol).__name__, f"{time.perf_counter() - start:.0f}", f"{peak_gib():.2f}"])
        disk = len(features["train"]) * bytes_per_image("pooled", features["train"]) / 1e9
    print(machine())
    print(f"{sizes['train']} images x {args.layers} layers x 2 x {args.dim}: {disk:.1f} GB in float16")
    print(f"resident before: {before:.2f} GiB")
    print(table(["protocol", "s", "peak GiB so far"], lines))


if __name__ == "__main__":
    main()
