"""Compare `Codebook.assign` with exact search in float64, on random and on clustered features.

A token that differs is an error unless its centroid is as good as the nearest: the distances (L2) closer than
1e-3 relative.
"""

import argparse
import sys

import torch
from torch import Tensor

from mapet_mm.experiments.benchmark import machine, table
from mapet_mm.tokenizers.codebook import Codebook

TIE = 1e-3
ROWS_AT_A_TIME = 256


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=20000, help="features of each kind")
    parser.add_argument("--dim", type=int, default=1024, help="feature channels")
    parser.add_argument("--k", type=int, default=2048, help="centroids")
    return parser.parse_args()


def random_features(rows: int, dim: int, k: int) -> tuple[Tensor, Tensor]:
    """Features and centroids of the same normal distribution: many near ties."""
    return torch.randn(rows, dim), torch.randn(k, dim)


def clustered_features(rows: int, dim: int, k: int) -> tuple[Tensor, Tensor]:
    """Features around the centroids, behind a ReLU."""
    centroids = torch.randn(k, dim).relu()
    return (centroids[torch.randint(k, (rows,))] + torch.randn(rows, dim)).relu(), centroids


def offset_features(rows: int, dim: int, k: int) -> tuple[Tensor, Tensor]:
    """Clustered, and far from the origin: where |c|^2 - 2 x.c cancels most."""
    features, centroids = clustered_features(rows, dim, k)
    offset = 10 * torch.rand(dim)
    return features + offset, centroids + offset


def compare(features: Tensor, centroids: Tensor, device: str) -> tuple[int, int]:
    """How many tokens differ from exact search, and how many of those are no ties."""
    tokens = Codebook(centroids).assign(features.to(device)).cpu()
    different, wrong = 0, 0
    for start in range(0, len(features), ROWS_AT_A_TIME):
        rows = slice(start, start + ROWS_AT_A_TIME)
        distances = torch.cdist(
            features[rows].double(), centroids.double(), compute_mode="donot_use_mm_for_euclid_dist"
        )
        nearest, exact = distances.min(dim=1)
        found = distances.gather(1, tokens[rows, None])[:, 0]
        different += int((exact != tokens[rows]).sum())
        wrong += int((found > nearest * (1 + TIE)).sum())
    return different, wrong


def main() -> None:
    """Measure every kind of feature in both precisions, print the table, fail on an error."""
    args = parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, errors = [], 0
    for make in (random_features, clustered_features, offset_features):
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            features, centroids = make(args.rows, args.dim, args.k)
            different, wrong = compare(features.to(dtype), centroids, device)
            kind = make.__name__.removesuffix("_features")
            rows.append([kind, str(dtype).removeprefix("torch."), str(different), str(wrong)])
            errors += wrong
    print(f"{args.rows} features of {args.dim} channels, k = {args.k}; {machine()}\n")
    print(table(["features", "precision", "tokens that differ", "of them no ties"], rows))
    sys.exit(errors > 0)


if __name__ == "__main__":
    main()
