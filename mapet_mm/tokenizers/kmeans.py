"""k-means on blocks of features, in any number of processes.

Nearest centroids are found by a matrix product on the device, as in `Codebook.assign`. Rows and starts are
drawn as `faiss.Kmeans` draws them for the same seed, and empty clusters are split as faiss splits them.
faiss's own loops are not used: `faiss.Kmeans` holds all rows in memory, `faiss.contrib.clustering.kmeans`
draws other starts. Its exact index is a tenth faster on a CPU, and gives 1 in 60,000 features another token
(docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from mmengine.device import get_device
from mmengine.dist import all_reduce, get_rank, get_world_size, is_main_process
from mmengine.logging import print_log
from torch import Tensor
from tqdm import tqdm

from mapet_mm.structures.codebook import Codebook, CodebookError, far_mean
from mapet_mm.utils.precision import full_float32

# Rows assigned at a time: 64 MiB of float32 at 4096 channels. Fixed, because the last bits of a matrix
# product may depend on its shape, and the codebook must not depend on the number of processes.
BLOCK_ROWS = 4096
NEXT_START = 15486557  # from the seed of one start to that of the next, in faiss
SPLIT = 1 / 1024  # by which the two halves of a split cluster differ from it, in faiss


@dataclass(frozen=True)
class KMeansOptions:
    """Settings of k-means, with faiss's meaning; the defaults are k-CLIP's, not faiss's.

    Args:
        k: number of centroids.
        niter: iterations of each start; fewer if an iteration changes nothing.
        nredo: random starts; the one with the lowest inertia is kept.
        max_points_per_centroid: if there are more than k times this many rows, that many are sampled.
        seed: for that sample, the starts and the splits.

    Examples:
        >>> KMeansOptions(k=128, nredo=1)
        KMeansOptions(k=128, niter=20, nredo=1, max_points_per_centroid=512, seed=0)
    """

    k: int
    niter: int = 20
    nredo: int = 5
    max_points_per_centroid: int = 512
    seed: int = 0


def fit_codebook(
    features: np.ndarray | Tensor, k: int, metadata: Mapping[str, Any] | None = None, **options: int
) -> Codebook:
    """Find k centroids of features in memory by k-means: L2 distance, not normalised (paper Section 4.2).

    Args:
        features: (rows, D) encoder features.
        k: number of centroids.
        metadata: recorded beside what this function adds (k, dim, rows, seed, inertia, versions).
        **options: of `KMeansOptions`: `niter`, `nredo`, `max_points_per_centroid`, `seed`.

    Raises:
        CodebookError: fewer rows than centroids, or features that are not a finite matrix.

    Examples:
        >>> import numpy as np
        >>> from mapet_mm.tokenizers import fit_codebook
        >>> codebook = fit_codebook(np.array([[0.0], [1.0], [8.0], [9.0]]), k=2)
        >>> sorted(codebook.centroids.flatten().tolist())
        [0.5, 8.5]
    """
    array = features.numpy(force=True) if isinstance(features, Tensor) else features
    rows = np.array(array, np.float32)
    if rows.ndim != 2 or not np.isfinite(rows).all():
        raise CodebookError(f"features must be a (rows, D) matrix of finite numbers, got {rows.shape}")
    blocks = [rows[first : first + BLOCK_ROWS] for first in range(0, len(rows), BLOCK_ROWS)]
    sizes = [len(block) for block in blocks]
    centroids, fitted = cluster(blocks, sizes, KMeansOptions(k, **options))
    return Codebook(centroids, {**(metadata or {}), **fitted})


def cluster(
    blocks: Sequence[Float[np.ndarray, "rows dim"]], sizes: Sequence[int], options: KMeansOptions
) -> tuple[Float32[np.ndarray, "k dim"], dict[str, Any]]:
    """Centroids of all rows, and metadata about the fit; float16 rows give the same bits in any processes.

    Args:
        blocks: features, read block by block in every iteration.
        sizes: number of rows of each block.
        options: settings of k-means.

    Raises:
        CodebookError: fewer rows than centroids.
    """
    require_rows(sum(sizes), options.k)
    rows = _Rows(blocks, sizes, options)
    total = options.nredo * options.niter
    best = np.empty(0)
    inertias = [float("inf")]
    with tqdm(total=total, desc="k-means", disable=not is_main_process()) as bar:
        for start in range(options.nredo):
            centroids, curve = _run_start(rows, options, start, bar)
            if curve[-1] < inertias[-1]:
                best = centroids
                inertias = curve
    fitted = {
        **asdict(options),
        "dim": best.shape[1],
        "rows": rows.total,
        "rows_clustered": len(rows.chosen),
        "inertia": inertias[-1],
        "inertia_per_iteration": inertias,
        "versions": {"torch": str(torch.__version__), "numpy": np.__version__},
    }
    return best, fitted


def require_rows(num_rows: int, k: int) -> None:
    """Raise CodebookError if there are fewer rows than centroids."""
    if num_rows < k:
        raise CodebookError(
            f"k-means needs at least as many feature rows as centroids: {num_rows} rows, k = {k}; "
            "sample more images or positions per image, or lower `codebook.k`"
        )


class _Rows:
    """The rows to cluster; each process assigns its share of the blocks on its device.

    Attributes:
        ends: the first row of each block, and the number of all rows at the end.
        total: number of rows.
        chosen: the rows to cluster, in the order that the starts are drawn from.
        in_order: the same, ascending.
    """

    def __init__(
        self, blocks: Sequence[Float[np.ndarray, "rows dim"]], sizes: Sequence[int], options: KMeansOptions
    ) -> None:
        self.blocks = blocks
        self.options = options
        self.device = torch.device(get_device())
        self.ends = list(accumulate(sizes, initial=0))
        self.total = self.ends[-1]
        limit = options.k * options.max_points_per_centroid
        if self.total <= limit:  # then faiss does not draw
            self.chosen = np.arange(self.total)
        else:
            self.chosen = draw_as_faiss(self.total, limit, options.seed)
        self.in_order = np.sort(self.chosen)

    def first_centroids(self, start: int) -> Float32[np.ndarray, "k dim"]:
        """The rows that a start begins with."""
        seed = self.options.seed + 1 + start * NEXT_START
        rows = self.chosen[draw_as_faiss(len(self.chosen), self.options.k, seed)]
        centroids: list[Any] = [None] * len(rows)
        for block_index, first in enumerate(self.ends[:-1]):
            drawn = np.flatnonzero((rows >= first) & (rows < self.ends[block_index + 1]))
            if drawn.size:
                block = self.blocks[block_index]
                for centroid in drawn.tolist():
                    centroids[centroid] = block[rows[centroid] - first].astype(np.float32)
        return np.stack(centroids)

    def assign(
        self, centroids: Float32[np.ndarray, "k dim"]
    ) -> tuple[Float64[np.ndarray, "k dim"], Int64[np.ndarray, " k"], float]:
        """Sum and number of the rows nearest to each centroid, and the sum of all squared distances.

        float16 features are multiples of 2^-24, so sums in float64 are exact in any order while a channel's
        sum stays below 2^29.
        """
        codebook = Codebook(centroids)
        sums = torch.zeros(centroids.shape, dtype=torch.float64, device=self.device)
        counts = torch.zeros(codebook.k, dtype=torch.int64, device=self.device)
        inertias = torch.zeros(len(self.blocks), dtype=torch.float64, device=self.device)
        for block_index in range(get_rank(), len(self.blocks), get_world_size()):
            features = self._chosen_of(block_index)
            for first in range(0, len(features), BLOCK_ROWS):
                rows = torch.from_numpy(features[first : first + BLOCK_ROWS]).to(self.device).float()
                with full_float32(self.device):
                    distances, ids = codebook.nearest(rows)
                # The fastest exact way to sum rows on a CPU (measured).
                sums.index_add_(0, ids, rows.double())
                counts += torch.bincount(ids, minlength=codebook.k)
                inertias[block_index] += distances.sum()
        # Each process has added its own blocks.
        for total in (sums, counts, inertias):
            all_reduce(total)
        return sums.cpu().numpy(), counts.cpu().numpy(), float(inertias.sum())

    def _chosen_of(self, block_index: int) -> Float[np.ndarray, "rows dim"]:
        """The rows of a block that are clustered."""
        first_row = self.ends[block_index]
        first, last = np.searchsorted(self.in_order, [first_row, self.ends[block_index + 1]])
        return self.blocks[block_index][self.in_order[first:last] - first_row]


def _run_start(
    rows: _Rows, options: KMeansOptions, start: int, bar: tqdm
) -> tuple[Float32[np.ndarray, "k dim"], list[float]]:
    """Centroids, and the inertia of each iteration, from one random start; it ends where nothing changes."""
    centroids = rows.first_centroids(start)
    inertias: list[float] = []
    num_splits = 0
    for iteration in range(options.niter):
        sums, counts, inertia = rows.assign(centroids)
        centroids = (sums / counts.clip(min=1)[:, None]).astype(np.float32)
        num_empty = np.count_nonzero(counts == 0)
        if num_empty:
            random = np.random.RandomState([options.seed % 2**32, start, iteration])
            split_largest(centroids, counts, random)
        num_splits += num_empty
        bar.update()
        unchanged = inertias[-1:] == [inertia] and not num_empty
        inertias.append(inertia)
        if unchanged:
            bar.update(options.niter - len(inertias))
            break
    print_log(
        f"k-means start {start + 1}/{options.nredo}: inertia {inertias[0]:.6g} after iteration 1, "
        f"{inertias[-1]:.6g} after iteration {len(inertias)}, {num_splits} empty clusters split",
        logger="current",
    )
    return centroids, inertias


def split_largest(
    centroids: Float32[np.ndarray, "k dim"], counts: Int64[np.ndarray, " k"], random: np.random.RandomState
) -> None:
    """Give each empty cluster half of another, in place: a large one more probably, as in faiss.

    The two halves lie on both sides of the old centroid, which faiss multiplies by a factor. Features far
    from the origin would leap by that, so their distance from the mean is multiplied.
    """
    factor = np.ones(centroids.shape[1], np.float32)
    factor[::2] += SPLIT
    factor[1::2] -= SPLIT
    mean = far_mean(torch.from_numpy(centroids[counts > 0]))
    origin = np.float32(0) if mean is None else mean.numpy()
    empty = np.flatnonzero(counts == 0)
    while empty.size:
        weights = np.maximum(counts - 1, 0)
        num_split = min(np.count_nonzero(weights), empty.size)
        sources = random.choice(len(counts), size=num_split, p=weights / weights.sum())
        for target, source in zip(empty[:num_split], sources, strict=True):
            distance = centroids[source] - origin
            centroids[target] = origin + distance * factor
            centroids[source] = origin + distance / factor
            counts[target] = counts[source] // 2
            counts[source] -= counts[target]
        empty = empty[num_split:]  # if more than half of all clusters were empty


def draw_as_faiss(count: int, num_drawn: int, seed: int) -> Int64[np.ndarray, " num_drawn"]:
    """The first of faiss's random permutation from a seed: each index swaps with a later one, or itself."""
    random = np.random.RandomState(seed % 2**32).randint(2**32, size=num_drawn, dtype=np.uint32)
    indices = np.arange(num_drawn)
    partners = indices + random % (count - indices)
    order = list(range(count))
    for index, partner in enumerate(partners.tolist()):
        order[index], order[partner] = order[partner], order[index]
    return np.array(order[:num_drawn], dtype=np.int64)
