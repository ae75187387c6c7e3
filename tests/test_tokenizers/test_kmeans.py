"""k-means in blocks against faiss in memory, and shared between processes."""

from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from mapet_mm.structures.codebook import KMeansOptions
from mapet_mm.tokenizers.kmeans import cluster

DIM = 24


def make_blocks(rows: int = 6000, clusters: int = 40) -> list[np.ndarray]:
    """Rows around random centres, as an encoder's after its ReLU, in blocks of different sizes."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(clusters, DIM))[rng.integers(clusters, size=rows)] * 2
    features = np.maximum(features + rng.normal(size=features.shape), 0).astype(np.float16)
    return np.array_split(features, np.sort(rng.choice(rows, 11, replace=False)))


def fit(blocks: list[np.ndarray], *options, **more) -> tuple:
    return cluster(blocks, list(map(len, blocks)), KMeansOptions(*options, **more))


@pytest.mark.parametrize("options", [dict(k=50, niter=5, seed=0), dict(k=16, niter=8, seed=3)])
@pytest.mark.parametrize("most", [100, 512])
def test_rows_starts_and_centroids_are_those_of_faiss_in_memory(options, most):
    """With 100 rows a centroid, 16 centroids cluster 1,600 rows that the seed draws."""
    options |= {"max_points_per_centroid": most, "nredo": 1}
    centroids, fitted = fit(make_blocks(), **options)
    reference = faiss.Kmeans(DIM, **options)
    reference.train(np.concatenate(make_blocks()).astype(np.float32))
    assert fitted["inertia_per_iteration"] == pytest.approx(reference.obj.tolist(), rel=1e-4)
    assert np.allclose(np.sort(centroids, axis=0), np.sort(reference.centroids, axis=0), atol=1e-2)
    assert fitted["rows_clustered"] == min(6000, most * options["k"])


def test_empty_clusters_are_split():
    rows = np.random.default_rng(0).normal(size=(4, DIM)).astype(np.float16)
    centroids, fitted = fit([rows[np.arange(600) % 4]], 8, 10, 1)
    assert len(np.unique(centroids, axis=0)) == 8
    assert fitted["inertia"] < 0.01


def test_the_start_of_lowest_inertia_is_kept():
    blocks = make_blocks()
    # A start draws its rows by the seed and its number.
    alone = [fit(blocks, 40, 1, 1, seed=15486557 * start) for start in range(4)]
    centroids, fitted = fit(blocks, 40, 1, 4)
    best = min(range(4), key=lambda start: alone[start][1]["inertia"])
    assert best == 2
    assert fitted["inertia"] == alone[best][1]["inertia"]
    assert (centroids == alone[best][0]).all()


def _fit(rank: int, processes: int, folder: str) -> None:
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    if processes > 1:
        meeting = f"file://{folder}/meeting_{processes}"
        torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=processes)
    centroids, fitted = fit(make_blocks(), 50, 6, 2)
    if rank == processes - 1:
        np.save(Path(folder) / f"centroids_{processes}.npy", centroids)
        assert len(fitted["inertia_per_iteration"]) == 6


def test_any_number_of_processes_gives_the_same_bits(tmp_path):
    for processes in (1, 2, 3):
        mp.start_processes(_fit, (processes, str(tmp_path)), nprocs=processes, start_method="fork")
    alone, *others = (np.load(tmp_path / f"centroids_{processes}.npy") for processes in (1, 2, 3))
    assert all((other == alone).all() for other in others)
