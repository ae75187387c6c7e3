"""Cluster features on disk, out of memory, and compare with faiss.Kmeans on the same rows in memory.

Each fit runs in its own process and reports its peak resident memory. The features are a mixture of Gaussians
after a ReLU, like those of an encoder's last stage, in float16 shards of 256 images.
"""

import json
import resource
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import faiss
import numpy as np
import torch
from harness import fresh, machine, parse_options, report
from mmengine.logging import MMLogger

from mapet_mm.tokenizers.feature_shards import FeatureShards
from mapet_mm.tokenizers.kmeans import KMeansOptions, cluster_shards

POSITIONS_PER_IMAGE = 4
CENTRES = 4096


def make_features(folder: Path, gigabytes: float, dim: int) -> FeatureShards:
    """Write the missing shards."""
    images = round(gigabytes * 1e9 / 2 / dim / POSITIONS_PER_IMAGE)
    names = [f"{index:08d}" for index in range(images)]
    shards = FeatureShards(folder, dict(positions_per_image=POSITIONS_PER_IMAGE, dim=dim), names)
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CENTRES, dim, generator=generator)
    for number, lacking in enumerate(map(shards.lacking, range(len(shards.names)))):
        if not lacking:
            continue
        generator.manual_seed(number + 1)
        rows = len(lacking) * POSITIONS_PER_IMAGE
        picked = centres[torch.randint(CENTRES, (rows,), generator=generator)]
        noise = torch.randn(rows, dim, generator=generator)
        shards.write(number, lacking, (picked + noise).relu_().half().numpy(), {})
    return shards


def fit_on_disk(shards: FeatureShards, settings: KMeansOptions) -> list[float]:
    """Fit with this package's k-means."""
    with tempfile.TemporaryDirectory() as folder:
        return cluster_shards(shards, settings, Path(folder) / "state")[1]


def fit_in_memory(shards: FeatureShards, settings: KMeansOptions) -> list[float]:
    """Fit with faiss.Kmeans."""
    features = np.empty((len(shards), shards.dim), dtype=np.float32)
    for number, rows in enumerate(shards.rows()):
        features[rows.start : rows.stop] = shards.read(number)
    kmeans = faiss.Kmeans(d=shards.dim, **asdict(settings))
    kmeans.train(features)
    return kmeans.obj.tolist()


METHODS = {"mapet_mm, on disk": fit_on_disk, "faiss.Kmeans, in memory": fit_in_memory}


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the features, run each method in its own process, and print the table."""
    args = parse_options(
        __doc__, arguments, gigabytes=4.0, dim=4096, k=1024, niter=3, folder="", only=("", ["", *METHODS])
    )
    if args.only:
        print(json.dumps(measure(args)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        args.folder = args.folder or f"{temporary}/features"
        shards = make_features(Path(args.folder), args.gigabytes, args.dim)
        told = [f"--{name}={value}" for name, value in vars(args).items() if name != "only"]
        rows = len(shards)
        measured = {name: fresh(__file__, [*told, f"--only={name}"]) for name in METHODS}
    figures = [
        [name, f"{of['seconds']:.1f}", f"{of['peak'] / 1e9:.2f}", f"{of['inertia']:.6g}"]
        for name, of in measured.items()
    ]
    what = f"{rows} rows of {args.dim} channels, k = {args.k}, {args.niter} iterations; {machine()}"
    report(what, ["", "seconds, loading included", "peak resident memory, GB", "inertia"], figures)
    ours, reference = measured.values()
    difference = ours["inertia"] / reference["inertia"] - 1
    print(f"\ntime {ours['seconds'] / reference['seconds']:.2f} x, inertia {difference:+.5%}")


def measure(args: Namespace) -> dict[str, float]:
    """Seconds, peak resident memory and inertia of one method, in this process."""
    MMLogger.get_instance("benchmark", log_level="WARNING")
    shards = make_features(Path(args.folder), args.gigabytes, args.dim)
    # Both methods cluster all rows.
    settings = KMeansOptions(args.k, args.niter, nredo=1, max_points_per_centroid=2**20)
    start = time.perf_counter()
    inertia = METHODS[args.only](shards, settings)[-1]
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "peak": peak, "inertia": inertia}


if __name__ == "__main__":
    main()
