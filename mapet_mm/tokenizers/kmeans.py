"""k-means on blocks of features, in any number of processes.

Nearest centroids are found by a matrix product on the device, as in `Codebook.assign`. Rows and starts are
drawn as `faiss.Kmeans` draws them for the same seed, and faiss splits empty clusters. faiss's own loops are
not used: `faiss.Kmeans` holds all rows in memory, `faiss.contrib.clustering.kmeans` draws other starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from typing import Any

import faiss
import numpy as np
import torch
from faiss.contrib.clustering import reassign_centroids
from jaxtyping import Float, Float32, Float64, Int64
from mmengine.device import get_device
from mmengine.dist import all_reduce, get_rank, get_world_size, is_main_process
from mmengine.logging import print_log
from tqdm import tqdm

from mapet_mm.structures.codebook import Codebook, CodebookError, KMeansOptions, far_centre
from mapet_mm.utils.precision import full_float32

# Rows assigned at a time: 64 MiB of float32 at 4096 channels. Fixed, because the last bits of a matrix
# product may depend on its shape, and the codebook must not depend on the number of processes.
BLOCK_ROWS = 4096
NEXT_START = 15486557  # from the seed of one start to that of the next, in faiss


def cluster(
    blocks: Sequence[Float[np.ndarray, "rows dim"]],
    sizes: Sequence[int],
    options: KMeansOptions,
) -> tuple[Float32[np.ndarray, "k dim"], dict[str, Any]]:
    """Centroids of all rows, and metadata about the fit; float16 rows give the same bits in any processes.

    Args:
        blocks: features, read block by block in every iteration.
        sizes: number of rows of each block.
        options: settings of k-means.

    Raises:
        CodebookError: fewer rows than centroids.
    """
    check_rows(sum(sizes), options.k)
    rows = _Rows(blocks, sizes, options)
    total = options.nredo * options.niter
    with tqdm(total=total, desc="k-means", disable=not is_main_process()) as bar:
        starts = (_one_start(rows, options, start, bar) for start in range(options.nredo))
        best, curve = min(starts, key=lambda start: start[1][-1])
    fitted = {
        **asdict(options),
        "dim": best.shape[1],
        "rows": rows.total,
        "rows_clustered": len(rows.chosen),
        "inertia": curve[-1],
        "inertia_per_iteration": curve,
        "versions": {"faiss": faiss.__version__, "torch": str(torch.__version__), "numpy": np.__version__},
    }
    return best, fitted


def check_rows(rows: int, k: int) -> None:
    if rows < k:
        raise CodebookError(
            f"k-means needs at least as many feature rows as centroids: {rows} rows, k = {k}; "
            "sample more images or positions per image, or lower `codebook.k`"
        )


class _Rows:
    """The rows to cluster; each process assigns its share of the blocks on its device."""

    def __init__(
        self, blocks: Sequence[Float[np.ndarray, "rows dim"]], sizes: Sequence[int], options: KMeansOptions
    ) -> None:
        self.blocks, self.options = blocks, options
        self.ends = list(accumulate(sizes, initial=0))
        self.total, limit = self.ends[-1], options.k * options.max_points_per_centroid
        self.chosen = _permutation(self.total, options.seed)[: min(self.total, limit)]
        self.in_order = np.sort(self.chosen)
        if self.total <= limit:  # then faiss does not draw
            self.chosen = self.in_order
        self.device = torch.device(get_device())

    def first_centroids(self, start: int) -> Float32[np.ndarray, "k dim"]:
        """The rows that a start begins with."""
        drawn = _permutation(len(self.chosen), self.options.seed + 1 + start * NEXT_START)[: self.options.k]
        rows = self.chosen[drawn]
        taken: list[Any] = [None] * len(rows)
        for number, (first, last) in enumerate(pairwise(self.ends)):
            if (here := np.flatnonzero((rows >= first) & (rows < last))).size:
                block = self.blocks[number]
                for place in here.tolist():
                    taken[place] = block[rows[place] - first].astype(np.float32)
        return np.stack(taken)

    def assign(
        self, centroids: Float32[np.ndarray, "k dim"]
    ) -> tuple[Float64[np.ndarray, "k dim"], Int64[np.ndarray, " k"], float]:
        """Sum and number of the rows nearest to each centroid, and the sum of all squared distances.

        float16 features are multiples of 2^-24, so sums in float64 are exact in any order while a channel's
        sum stays below 2^29.
        """
        codebook, k = Codebook(centroids), len(centroids)
        sums = torch.zeros(centroids.shape, dtype=torch.float64, device=self.device)
        counts = torch.zeros(k, dtype=torch.int64, device=self.device)
        inertias = torch.zeros(len(self.blocks), dtype=torch.float64, device=self.device)
        for number in range(get_rank(), len(self.blocks), get_world_size()):
            first, last = np.searchsorted(self.in_order, self.ends[number : number + 2])
            features = self.blocks[number][self.in_order[first:last] - self.ends[number]]
            for begin in range(0, len(features), BLOCK_ROWS):
                rows = torch.from_numpy(features[begin : begin + BLOCK_ROWS]).to(self.device).float()
                with full_float32(self.device):
                    distances, ids = codebook.nearest(rows)
                # The fastest exact way to sum rows on a CPU (measured).
                sums.index_add_(0, ids, rows.double())
                counts += torch.bincount(ids, minlength=k)
                inertias[number] += distances.sum()
        for total in (sums, counts, inertias):
            all_reduce(total)
        return sums.cpu().numpy(), counts.cpu().numpy(), float(inertias.sum())


def _one_start(
    rows: _Rows, options: KMeansOptions, start: int, bar: tqdm
) -> tuple[Float32[np.ndarray, "k dim"], list[float]]:
    """Centroids, and the inertia of each iteration, from one random start; it ends where nothing changes."""
    centroids, inertias, splits = rows.first_centroids(start), [], 0
    for iteration in range(options.niter):
        sums, counts, inertia = rows.assign(centroids)
        centroids = (sums / counts.clip(min=1)[:, None]).astype(np.float32)
        random = np.random.RandomState([options.seed % 2**32, start, iteration])
        # faiss splits a cluster by a factor, which is a leap if the features are far from the origin.
        centre = far_centre(torch.from_numpy(centroids[counts > 0]))
        offset = 0 if centre is None else centre.numpy()
        centroids -= offset
        split = reassign_centroids(counts, centroids, random)
        centroids += offset
        splits += split
        inertias.append(inertia)
        bar.update()
        if not split and inertias[-2:-1] == [inertia]:
            bar.update(options.niter - len(inertias))
            break
    print_log(
        f"k-means start {start + 1}/{options.nredo}: inertia {inertias[0]:.6g} after iteration 1, "
        f"{inertias[-1]:.6g} after iteration {len(inertias)}, {splits} empty clusters split",
        logger="current",
    )
    return centroids, inertias


def _permutation(count: int, seed: int) -> Int64[np.ndarray, " count"]:
    """A permutation drawn by faiss's generator."""
    drawn = np.empty(count, dtype=np.int32)
    faiss.rand_perm(faiss.swig_ptr(drawn), count, seed)
    return drawn.astype(np.int64)
