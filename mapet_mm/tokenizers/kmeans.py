"""k-means on feature shards, out of memory, in any number of processes, resumable after each iteration.

Nearest centroids are found by a matrix product on the device, as in `Codebook.assign`. faiss splits empty
clusters and draws the random numbers, so rows and starts are those of `faiss.Kmeans` with the same seed.
faiss's own loops are not used because `faiss.Kmeans` holds all rows in memory, and
`faiss.contrib.clustering.kmeans` can neither redo nor resume.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import faiss
import numpy as np
import torch
from faiss.contrib.clustering import imbalance_factor, reassign_centroids
from jaxtyping import Float32, Float64, Int64
from mmengine.device import get_device
from mmengine.dist import all_reduce, get_rank, get_world_size, is_main_process
from mmengine.logging import print_log
from torch import Tensor
from tqdm import tqdm

from mapet_mm.models.target_generators.base import full_float32
from mapet_mm.structures.codebook import Codebook, CodebookError, KMeansOptions
from mapet_mm.tokenizers.feature_shards import FeatureShards
from mapet_mm.utils.atomic_files import replace_file

# Rows assigned at a time: 64 MiB of float32 at 4096 channels. Fixed, because the last bits of a matrix
# product may depend on its shape, and the codebook must not depend on the number of processes.
BLOCK_ROWS = 4096


class Assignment(NamedTuple):
    """Result of assigning all rows to their nearest centroids.

    `sums` holds each cluster's sum of features in float64. float16 features are multiples of 2^-24, so these
    sums are exact in any order while a channel's sum stays below 2^29.
    """

    sums: Float64[Tensor, "k dim"]
    counts: Int64[np.ndarray, " k"]
    inertia: float


@dataclass
class Progress:
    """State of a fit, as saved in its checkpoint."""

    redo: int = 0
    iteration: int = 0
    centroids: Tensor | None = None
    inertias: tuple[float, ...] = ()
    best_centroids: Tensor | None = None
    best_inertias: tuple[float, ...] = ()


def cluster_shards(
    shards: FeatureShards, options: KMeansOptions, checkpoint: Path
) -> tuple[Float32[np.ndarray, "k dim"], list[float]]:
    """Centroids of all rows of the shards, and their inertia per iteration (sum of squared L2 distances).

    Each process assigns its share of the shards; the result is bit-identical for any number of processes.
    A killed run continues from its checkpoint, given the same shards and options, with the same result as an
    uninterrupted run.

    Args:
        shards: complete feature shards, in a folder that all processes see.
        options: settings of k-means.
        checkpoint: written by the main process after every iteration; remove it once the result is saved.

    Raises:
        CodebookError: the checkpoint is damaged.
    """
    key = {**asdict(options), "features": shards.digest}
    chosen = _chosen_rows(len(shards), options)
    progress = _load_progress(checkpoint, key)
    assigner = _Assigner(shards, chosen)
    total = options.nredo * options.niter
    done = progress.redo * options.niter + progress.iteration
    with tqdm(total=total, initial=done, desc="k-means", disable=not is_main_process()) as bar:
        while progress.redo < options.nredo:
            _start_redo(progress, shards, chosen, options)
            _iterate(progress, assigner, options)
            bar.update(progress.redo * options.niter + progress.iteration - bar.n)
            if is_main_process():
                _save_progress(checkpoint, key, progress)
    return progress.best_centroids.numpy(), list(progress.best_inertias)


def _start_redo(
    progress: Progress, shards: FeatureShards, chosen: np.ndarray | None, options: KMeansOptions
) -> None:
    if progress.iteration == 0:
        count = len(shards) if chosen is None else len(chosen)
        # faiss's offset between the seeds of redos.
        starts = _random_permutation(count, options.seed + 1 + progress.redo * 15486557)[: options.k]
        progress.centroids = torch.from_numpy(shards.take(starts if chosen is None else chosen[starts]))
        progress.inertias = ()


def _iterate(progress: Progress, assigner: _Assigner, options: KMeansOptions) -> None:
    """Run one iteration; end the redo if it was the last iteration or changed nothing."""
    assigned = assigner.assign(progress.centroids)
    counts = assigned.counts.copy()
    means = assigned.sums / torch.from_numpy(np.maximum(counts, 1))[:, None]
    centroids = means.numpy().astype(np.float32)
    random = np.random.RandomState([options.seed % 2**32, progress.redo, progress.iteration])
    splits = reassign_centroids(counts, centroids, random)
    ids = np.repeat(np.arange(options.k), assigned.counts)
    print_log(
        f"k-means start {progress.redo + 1}/{options.nredo}, iteration {progress.iteration + 1}/"
        f"{options.niter}: inertia {assigned.inertia:.6g}, imbalance "
        f"{imbalance_factor(options.k, ids):.3f}, {splits} empty clusters split",
        logger="current",
    )
    settled = splits == 0 and progress.inertias[-1:] == (assigned.inertia,)
    progress.centroids = torch.from_numpy(centroids)
    progress.inertias += (assigned.inertia,)
    progress.iteration += 1
    if settled or progress.iteration == options.niter:
        if not progress.best_inertias or progress.inertias[-1] < progress.best_inertias[-1]:
            progress.best_centroids, progress.best_inertias = progress.centroids, progress.inertias
        progress.redo, progress.iteration = progress.redo + 1, 0


class _Assigner:
    """Assigns this process's shards to centroids on its device, and sums over all processes."""

    def __init__(self, shards: FeatureShards, chosen: Int64[np.ndarray, " count"] | None) -> None:
        self.shards, self.rows = shards, shards.rows()
        self.chosen = None if chosen is None else np.sort(chosen)
        self.mine = range(get_rank(), len(self.rows), get_world_size())
        self.device = torch.device(get_device())

    def assign(self, centroids: Float32[Tensor, "k dim"]) -> Assignment:
        codebook, k = Codebook(centroids), len(centroids)
        sums = torch.zeros(centroids.shape, dtype=torch.float64, device=self.device)
        counts = torch.zeros(k, dtype=torch.int64, device=self.device)
        inertias = torch.zeros(len(self.rows), dtype=torch.float64, device=self.device)
        for number in self.mine:
            for block in self._blocks(number):
                with full_float32(self.device):
                    distances, ids = codebook.nearest(block)
                # The fastest exact way to sum rows on a CPU (measured).
                sums.index_add_(0, ids, block.double())
                counts += torch.bincount(ids, minlength=k)
                inertias[number] += distances.sum()
        for total in (sums, counts, inertias):
            all_reduce(total)
        return Assignment(sums.cpu(), counts.cpu().numpy(), float(inertias.sum()))

    def _blocks(self, number: int) -> Iterator[Float32[Tensor, "rows dim"]]:
        """The chosen rows of a shard in blocks, as float32."""
        features = self.shards.read(number)
        if self.chosen is not None:
            rows = self.rows[number]
            first, last = np.searchsorted(self.chosen, [rows.start, rows.stop])
            features = features[self.chosen[first:last] - rows.start]
        for start in range(0, len(features), BLOCK_ROWS):
            yield torch.from_numpy(features[start : start + BLOCK_ROWS]).to(self.device).float()


def _chosen_rows(rows: int, options: KMeansOptions) -> Int64[np.ndarray, " count"] | None:
    """The rows to cluster, in the order in which faiss draws them; None for all."""
    limit = options.k * options.max_points_per_centroid
    return _random_permutation(rows, options.seed)[:limit] if rows > limit else None


def _random_permutation(count: int, seed: int) -> Int64[np.ndarray, " count"]:
    """A permutation drawn by faiss's generator."""
    permutation = np.empty(count, dtype=np.int32)
    faiss.rand_perm(faiss.swig_ptr(permutation), count, seed)
    return permutation.astype(np.int64)


def _save_progress(path: Path, key: dict, progress: Progress) -> None:
    content = io.BytesIO()
    torch.save({"key": key, "progress": vars(progress)}, content)
    replace_file(path, content.getvalue())


def _load_progress(path: Path, key: dict) -> Progress:
    if not path.exists():
        return Progress()
    try:
        found = torch.load(path, weights_only=True)
    except Exception as error:  # what a broken file raises depends on where it is broken
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CodebookError(
            f"`{path}`, the state of an interrupted k-means, is truncated or damaged ({reason}): remove it, "
            "and k-means starts anew from the features beside it"
        ) from error
    if found["key"] != key:
        print_log(f"k-means starts anew: `{path}` was made with other settings or features", "current")
        return Progress()
    progress = Progress(**found["progress"])
    print_log(f"k-means continues after start {progress.redo + 1}, iteration {progress.iteration}", "current")
    return progress
