"""Cluster features on disk, out of memory, beside faiss.Kmeans on the same rows in memory.

Each fit runs in a process of its own and reports its peak resident memory. The features are a mixture of
Gaussians behind a ReLU, as an encoder's last stage gives them, in float16 shards of 256 images.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import faiss
import numpy as np
import torch
from mmengine.logging import MMLogger

from mapet_mm.benchmark import machine, table
from mapet_mm.tokenizers.codebook.feature_shards import FeatureShards
from mapet_mm.tokenizers.codebook.kmeans import KMeansOptions, cluster_shards

POSITIONS_PER_IMAGE = 4
CENTRES = 4096


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of float16 features")
    parser.add_argument("--dim", type=int, default=4096, help="feature channels")
    parser.add_argument("--k", type=int, default=1024, help="centroids")
    parser.add_argument("--niter", type=int, default=3, help="iterations")
    parser.add_argument("--folder", type=Path, help="where to keep the features; default: a temporary one")
    parser.add_argument("--only", choices=METHODS, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_features(folder: Path, gigabytes: float, dim: int) -> FeatureShards:
    """Write the shards that are not there yet."""
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


def fit_on_disk(shards: FeatureShards, options: KMeansOptions) -> list[float]:
    """Ours."""
    with tempfile.TemporaryDirectory() as folder:
        return cluster_shards(shards, options, Path(folder) / "state")[1]


def fit_in_memory(shards: FeatureShards, options: KMeansOptions) -> list[float]:
    """faiss.Kmeans."""
    features = np.empty((len(shards), shards.dim), dtype=np.float32)
    for number, rows in enumerate(shards.rows()):
        features[rows.start : rows.stop] = shards.read(number)
    kmeans = faiss.Kmeans(
        shards.dim,
        options.k,
        niter=options.niter,
        nredo=options.nredo,
        max_points_per_centroid=options.max_points_per_centroid,
        seed=options.seed,
    )
    kmeans.train(features)
    return kmeans.obj.tolist()


METHODS = {"mapet_mm, on disk": fit_on_disk, "faiss.Kmeans, in memory": fit_in_memory}


def main() -> None:
    """Make the features, run each method by itself, print the table."""
    args = parse_args()
    # All rows are clustered, by both.
    options = KMeansOptions(args.k, args.niter, nredo=1, max_points_per_centroid=2**20)
    MMLogger.get_instance("benchmark", log_level="WARNING")
    if args.only:
        shards = make_features(args.folder, args.gigabytes, args.dim)
        start = time.perf_counter()
        inertia = METHODS[args.only](shards, options)
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(dict(seconds=seconds, peak=peak, inertia=inertia[-1])))
        return
    with tempfile.TemporaryDirectory() as temporary:
        args.folder = args.folder or Path(temporary) / "features"
        shards = make_features(args.folder, args.gigabytes, args.dim)
        measured = {name: alone(name, args) for name in METHODS}
    ours, reference = measured.values()
    print(f"{len(shards)} rows of {args.dim} channels, k = {args.k}, {args.niter} iterations; {machine()}\n")
    rows = [
        [name, f"{of['seconds']:.1f}", f"{of['peak'] / 1e9:.2f}", f"{of['inertia']:.6g}"]
        for name, of in measured.items()
    ]
    print(table(["", "seconds, loading included", "peak resident memory, GB", "inertia"], rows))
    difference = ours["inertia"] / reference["inertia"] - 1
    print(f"\ntime {ours['seconds'] / reference['seconds']:.2f} x, inertia {difference:+.5%}")


def alone(method: str, args: argparse.Namespace) -> dict:
    """Run one method in a fresh process."""
    command = [sys.executable, "-W", "ignore", __file__, "--only", method, "--folder", str(args.folder)]
    for option in ("gigabytes", "dim", "k", "niter"):
        command += [f"--{option}", str(getattr(args, option))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
