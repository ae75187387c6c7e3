"""Codebooks from features: in memory by faiss's own k-means, or from shards on disk by `kmeans`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from mmengine.logging import print_log
from torch import Tensor

from mapet_mm.structures.codebook import Codebook, CodebookError, KMeansOptions, far_centre
from mapet_mm.tokenizers.feature_shards import FeatureShards
from mapet_mm.tokenizers.kmeans import cluster_shards

# So many rows at most say whether features are far from the origin.
ROWS_FOR_CENTRE = 10_000


def fit_in_memory(
    features: np.ndarray | Tensor, options: KMeansOptions, gpu: bool
) -> tuple[np.ndarray, dict[str, Any]]:
    """Fit centroids to features in memory; returns them and metadata about the fit (see `Codebook.fit`)."""
    features = _as_rows(features, options.k)
    settings = {key: value for key, value in asdict(options).items() if key != "k"}
    some = torch.tensor(features[:: -(-len(features) // ROWS_FOR_CENTRE)])  # a copy: they may be read-only
    centre = 0 if (far := far_centre(some)) is None else far.numpy()
    kmeans = faiss.Kmeans(features.shape[1], options.k, gpu=gpu, **settings)
    kmeans.train(features if far is None else features - centre)
    inertia = _best_run(kmeans.obj, options.niter)
    print_log(
        f"k-means, best of {options.nredo}: inertia {inertia[0]:.6g} after iteration 1, "
        f"{inertia[-1]:.6g} after iteration {len(inertia)}",
        logger="current",
    )
    return kmeans.centroids + centre, _fitted(*features.shape, options, inertia)


def fit_shards(
    shards: FeatureShards,
    options: KMeansOptions,
    checkpoint: Path,
    metadata: Mapping[str, Any] | None = None,
) -> Codebook:
    """Fit a codebook to features on disk, out of memory, in all processes; resumable (see `cluster_shards`).

    Args:
        shards: complete feature shards.
        options: settings of k-means.
        checkpoint: file with the state after the last iteration; remove it once the codebook is saved.
        metadata: recorded beside what this function adds (k, dim, rows, seed, inertia, versions).

    Raises:
        CodebookError: fewer rows than centroids.
    """
    check_rows(len(shards), options.k)
    centroids, inertia = cluster_shards(shards, options, checkpoint)
    return Codebook(centroids, {**(metadata or {}), **_fitted(len(shards), shards.dim, options, inertia)})


def check_rows(rows: int, k: int) -> None:
    """Raise CodebookError if there are fewer feature rows than centroids."""
    if rows < k:
        raise CodebookError(
            f"k-means needs at least as many feature rows as centroids: {rows} rows, k = {k}; "
            "sample more images or positions per image, or lower `codebook.k`"
        )


def _best_run(objectives: np.ndarray, niter: int) -> list[float]:
    """Inertia per iteration of the best redo, from faiss's list of all redos up to and including it.

    A redo may stop early, so its start is found where the inertia last rose. Within a redo it only falls,
    unless faiss refills an empty cluster; the list then starts there.
    """
    tail = [float(objective) for objective in objectives[-niter:]]
    rises = [index for index in range(1, len(tail)) if tail[index] > tail[index - 1]]
    return tail[rises[-1] :] if rises else tail


def _as_rows(features: np.ndarray | Tensor, k: int) -> np.ndarray:
    if isinstance(features, Tensor):
        features = features.detach().cpu().numpy()
    if features.ndim != 2:
        raise CodebookError(f"features must be a (rows, D) matrix, got shape {tuple(features.shape)}")
    check_rows(len(features), k)
    features = np.ascontiguousarray(features, dtype=np.float32)
    if not np.isfinite(features).all():
        raise CodebookError("features hold NaN or infinity: check the encoder's weights and the input images")
    return features


def _fitted(rows: int, dim: int, options: KMeansOptions, inertia: list[float]) -> dict[str, Any]:
    """Metadata about the fit."""
    return {
        **asdict(options),
        "dim": dim,
        "rows": rows,
        "rows_clustered": min(rows, options.k * options.max_points_per_centroid),
        "inertia": inertia[-1],
        "inertia_per_iteration": inertia,
        "versions": {
            "faiss": faiss.__version__,
            "torch": str(torch.__version__),
            "numpy": np.__version__,
        },
    }
