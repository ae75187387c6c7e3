"""Codebooks by faiss's k-means, from features of any number, in any number of processes.

`faiss.contrib.clustering.kmeans` draws the start, iterates, and splits empty clusters. It takes any data set
that counts its rows, gives some of them, and assigns all to centroids: here one whose rows are read part by
part, multiplied on the device that is there, and added up over the processes. faiss's own index finds nearest
centroids a tenth faster on a CPU, and gives 1 in 60,000 features another token than `Codebook.assign`, which
makes the tokens; `faiss.Kmeans` wants all rows in memory.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from mmengine.device import get_device
from mmengine.dist import all_reduce, get_rank, get_world_size, is_main_process
from mmengine.logging import print_log
from torch import Tensor
from tqdm import tqdm

from mapet_mm.structures.codebook import Codebook, CodebookError, far_mean
from mapet_mm.structures.parts import WRITTEN, Parts
from mapet_mm.utils.precision import full_float32

# Rows assigned at a time: 64 MiB of float32 at 4096 channels. Fixed, because the last bits of a matrix
# product may depend on its shape, and the codebook must not depend on the number of processes.
BLOCK_ROWS = 4096
NEXT_START = 15486557  # from the seed of one start to that of the next, as `faiss.Kmeans` has it
# Bytes of a GPU's memory that rows which stay there leave free, for the products of a block and others.
LEFT_FREE = 4 * 2**30


@dataclass(frozen=True)
class KMeansOptions:
    """Settings of k-means, with faiss's meaning; the defaults are k-CLIP's, not faiss's.

    Args:
        k: number of centroids.
        niter: iterations of each start.
        nredo: random starts; the one with the lowest inertia is kept.
        max_points_per_centroid: if there are more than k times this many rows, that many are sampled.
        seed: for that sample, the starts and the splits of empty clusters.

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
    centroids, fitted = cluster(RowsInMemory(rows), KMeansOptions(k, **options))
    return Codebook(centroids, {**(metadata or {}), **fitted})


def cluster(
    rows: RowsInMemory | RowsOfImages, options: KMeansOptions
) -> tuple[Float32[np.ndarray, "k dim"], dict[str, Any]]:
    """Centroids of all rows, and metadata about the fit; float16 rows give the same bits in any processes.

    Args:
        rows: what to cluster, the same in all processes.
        options: settings of k-means.

    Raises:
        CodebookError: fewer rows than centroids.
    """
    import faiss  # where a codebook is fitted, and nowhere else
    from faiss.contrib.clustering import kmeans

    require_rows(rows.ends[-1], options.k)
    points = Points(rows, options)
    say_cost(points, options)
    best = np.empty(0)
    inertias = [float("inf")]
    total = options.nredo * options.niter
    with tqdm(total=total, desc="k-means", disable=not is_main_process()) as points.bar:
        for start in range(options.nredo):
            seed = (options.seed + start * NEXT_START) % 2**32
            with redirect_stdout(io.StringIO()):  # it prints a line or two, also if not verbose
                centroids, iterations = kmeans(
                    options.k, points, options.niter, seed, verbose=False, return_stats=True
                )
            curve = [iteration["obj"] for iteration in iterations]
            num_splits = sum(iteration["nsplit"] for iteration in iterations)
            if is_main_process():
                print_log(
                    f"k-means start {start + 1}/{options.nredo}: inertia {curve[0]:.6g} after iteration 1, "
                    f"{curve[-1]:.6g} after iteration {len(curve)}, {num_splits} empty clusters split",
                    logger="current",
                )
            if curve[-1] < inertias[-1]:
                best = (centroids + points.origin).astype(np.float32)
                inertias = curve
    fitted = {
        **asdict(options),
        "dim": rows.dim,
        "rows": int(rows.ends[-1]),
        "rows_clustered": points.count(),
        "inertia": inertias[-1],
        "inertia_per_iteration": inertias,
        "versions": {
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "faiss": faiss.__version__,
        },
    }
    return best, fitted


def require_rows(num_rows: int, k: int) -> None:
    """Raise CodebookError if there are fewer rows than centroids."""
    if num_rows < k:
        raise CodebookError(
            f"k-means needs at least as many feature rows as centroids: {num_rows} rows, k = {k}; "
            "sample more images or positions per image, or lower `codebook.k`"
        )


def say_cost(points: Points, options: KMeansOptions) -> None:
    """Say what the clustering costs, by the time that a first block takes."""
    if not is_main_process():
        return
    codebook = Codebook(points.get_subset(np.arange(options.k)) + points.origin)
    for _ in range(2):  # once to warm up
        sums = points.no_sums(codebook)
        began = time.perf_counter()
        points.add_block(codebook, 0, sums)
        num_rows = sums.counts.sum().item()
        seconds = time.perf_counter() - began
    seconds *= points.count() / max(num_rows, 1) / get_world_size() * options.nredo * options.niter
    duration = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:,.0f} minutes"
    print_log(
        f"clustering {points.count():,} rows of {points.dim()} channels to {options.k} centroids: "
        f"{options.nredo} starts of {options.niter} iterations, about {duration}",
        logger="current",
    )


class RowsInMemory:
    """An array of features, in blocks.

    Attributes:
        dim: channels of a row.
        ends: the first row of each block, and the number of all rows at the end.
    """

    def __init__(self, array: Float[np.ndarray, "rows dim"]) -> None:
        self.array = array
        self.dim = array.shape[1]
        self.ends = np.append(np.arange(0, len(array), BLOCK_ROWS), len(array))

    def block(self, index: int) -> Float[np.ndarray, "rows dim"]:
        """The rows of a block."""
        return self.array[self.ends[index] : self.ends[index + 1]]

    def take(self, indices: Int64[np.ndarray, " rows"]) -> Float[np.ndarray, "rows dim"]:
        """Some rows, in this order."""
        return self.array[indices]


class RowsOfImages:
    """Sampled features on disk: some rows of each image that has any; a part is a block."""

    def __init__(self, features: Parts) -> None:
        self.features = features
        self.per_image, self.dim = features.shape
        self.images = np.flatnonzero(features.all_states() == WRITTEN)
        first_images = np.arange(len(features) + 1) * features.part_rows
        self.ends = np.searchsorted(self.images, first_images) * self.per_image

    def block(self, index: int) -> Float[np.ndarray, "rows dim"]:
        """The rows of a part."""
        file = self.features.open(index)
        is_written = file.rows("states") == WRITTEN
        return file.rows(self.features.kind)[is_written].reshape(-1, self.dim)

    def take(self, indices: Int64[np.ndarray, " rows"]) -> Float[np.ndarray, "rows dim"]:
        """Some rows, in this order, of which nothing else is read."""
        rows = np.empty((len(indices), self.dim), self.features.dtype)
        images, positions = np.divmod(indices, self.per_image)
        for row, image, position in zip(rows, self.images[images].tolist(), positions.tolist(), strict=True):
            self.features.read_row(image, row, position * row.nbytes)
        return rows


class Sums(NamedTuple):
    """Of rows, by their nearest centroid; and of their squared distances from it, by block."""

    by_centroid: Float64[Tensor, "k dim"]
    counts: Int64[Tensor, " k"]
    inertias: Float64[Tensor, " blocks"]


class Points:
    """The rows to cluster, as `faiss.contrib.clustering.kmeans` takes them.

    Each process reads and assigns its share of the blocks. What it gives faiss is the same in all of them. A
    GPU keeps the blocks that its memory has room for, so that an iteration reads only the others.

    Args:
        rows: all rows.
        options: if there are more than `k * max_points_per_centroid`, so many are drawn by the seed.

    Attributes:
        origin: what faiss's centroids are relative to: 0, or the mean of rows that are far from 0. faiss
            splits a cluster by a factor of its centroid, by which such centroids would leap.
        bar: counts the iterations.
    """

    origin: float | Float64[np.ndarray, " dim"]
    bar: tqdm

    def __init__(self, rows: RowsInMemory | RowsOfImages, options: KMeansOptions) -> None:
        self.rows = rows
        self.device = torch.device(get_device())
        self.kept: dict[int, Tensor] = {}  # blocks that stay on the device
        total = int(rows.ends[-1])
        limit = options.k * options.max_points_per_centroid
        self.is_chosen = np.ones(total, bool)
        if total > limit:
            random = np.random.default_rng(options.seed % 2**32)
            self.is_chosen[random.choice(total, total - limit, replace=False, shuffle=False)] = False

    def count(self) -> int:
        """Number of rows."""
        return int(np.count_nonzero(self.is_chosen))

    def dim(self) -> int:
        """Channels of a row."""
        return self.rows.dim

    def get_subset(self, indices: Int64[np.ndarray, " rows"]) -> Float[np.ndarray, "rows dim"]:
        """Rows that a start begins with, less the origin, which they decide."""
        rows = self.rows.take(np.flatnonzero(self.is_chosen)[indices]).astype(np.float32)
        mean = far_mean(torch.from_numpy(rows))
        self.origin = 0.0 if mean is None else mean.double().numpy()
        return rows - self.origin

    def assign_to(
        self, centroids: Float[np.ndarray, "k dim"], weights: None = None
    ) -> tuple[Int64[np.ndarray, " rows"], Float64[np.ndarray, " blocks"], Float64[np.ndarray, "k dim"]]:
        """Assign all rows: their centroids in ascending order, their distances' sums, and sums by centroid.

        faiss counts the rows of each centroid and adds the distances up, so it needs neither row by row.
        float16 features are multiples of 2^-24, so sums in float64 are exact in any order while a channel's
        sum stays below 2^29. faiss divides them in float64; they are rounded to float32 here, before use.
        """
        codebook = Codebook(centroids + self.origin)
        sums = self.no_sums(codebook)
        for block in range(get_rank(), len(self.rows.ends) - 1, get_world_size()):
            self.add_block(codebook, block, sums)
        # Each process has added its own blocks.
        for total in sums:
            all_reduce(total)
        by_centroid, counts, inertias = (total.cpu().numpy() for total in sums)
        self.bar.update()
        assigned = np.repeat(np.arange(codebook.k), counts)
        return assigned, inertias, by_centroid - counts[:, None] * self.origin

    def no_sums(self, codebook: Codebook) -> Sums:
        """Sums of no rows."""
        by_centroid = torch.zeros(codebook.k, codebook.dim, dtype=torch.float64, device=self.device)
        counts = torch.zeros(codebook.k, dtype=torch.int64, device=self.device)
        inertias = torch.zeros(len(self.rows.ends) - 1, dtype=torch.float64, device=self.device)
        return Sums(by_centroid, counts, inertias)

    def block_on_device(self, block: int) -> Float[Tensor, "rows dim"]:
        """The rows of a block that are clustered, as they are stored."""
        if block in self.kept:
            return self.kept[block]
        start, end = self.rows.ends[block : block + 2]
        rows = torch.from_numpy(self.rows.block(block)[self.is_chosen[start:end]]).to(self.device)
        if has_room(self.device, rows.nbytes):
            self.kept[block] = rows
        return rows

    def add_block(self, codebook: Codebook, block: int, sums: Sums) -> None:
        """Add the rows of a block, in place."""
        for stored in self.block_on_device(block).split(BLOCK_ROWS):
            rows = stored.float()
            with full_float32(self.device):
                distances, ids = codebook.nearest(rows)
            # The fastest exact way to sum rows on a CPU (measured).
            sums.by_centroid.index_add_(0, ids, rows.double())
            sums.counts.add_(torch.bincount(ids, minlength=codebook.k))
            sums.inertias[block] += distances.sum()


def has_room(device: torch.device, num_bytes: int) -> bool:
    """True if a GPU may keep so many bytes; a CPU reads files from its own memory anyway."""
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return free - num_bytes > LEFT_FREE
