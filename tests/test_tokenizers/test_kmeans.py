"""k-means in blocks against faiss in memory, and shared between processes."""

from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from faiss.contrib.clustering import reassign_centroids

from mapet_mm.structures import CodebookError
from mapet_mm.tokenizers import fit_codebook
from mapet_mm.tokenizers.kmeans import KMeansOptions, cluster, draw_as_faiss, split_largest

DIM = 24


def make_blocks(rows: int = 6000, clusters: int = 40) -> list[np.ndarray]:
    """Rows around random centres, as an encoder's after its ReLU, in blocks of different sizes."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(clusters, DIM))[rng.integers(clusters, size=rows)] * 2
    features = np.maximum(features + rng.normal(size=features.shape), 0).astype(np.float16)
    return np.array_split(features, np.sort(rng.choice(rows, 11, replace=False)))


def fit(blocks: list[np.ndarray], *options, **more) -> tuple:
    return cluster(blocks, list(map(len, blocks)), KMeansOptions(*options, **more))


@pytest.mark.parametrize(("count", "seed"), [(1, 0), (1000, 3), (5000, 2**32 + 5), (77, -3)])
def test_rows_are_drawn_as_faiss_draws_them(count, seed):
    drawn = np.empty(count, np.int32)
    faiss.rand_perm(faiss.swig_ptr(drawn), count, seed)
    assert (draw_as_faiss(count, count, seed) == drawn).all()
    assert (draw_as_faiss(count, count // 3, seed) == drawn[: count // 3]).all()


@pytest.mark.parametrize("num_empty", [1, 30, 90])
def test_empty_clusters_are_split_as_faiss_splits_them(num_empty):
    """Of more than half of them, some are split from clusters that were split before."""
    rng = np.random.default_rng(0)
    centroids = rng.normal(size=(100, DIM)).astype(np.float32)
    counts = rng.integers(1, 50, size=100)
    counts[rng.choice(100, num_empty, replace=False)] = 0
    expected = centroids.copy()
    expected_counts = counts.copy()
    reassign_centroids(expected_counts, expected, np.random.RandomState(7))
    split_largest(centroids, counts, np.random.RandomState(7))
    assert (centroids == expected).all()
    assert (counts == expected_counts).all()


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


def test_codebooks_of_features_far_from_the_origin_are_as_good_as_of_centred_ones():
    """Products in float32 would not tell the rows apart."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 96, generator=generator).repeat(40, 1)
    rows += 0.5 * torch.randn(rows.shape, generator=generator)
    centred, far = (
        fit_codebook((rows + mean).requires_grad_(), k=64, niter=10, nredo=1) for mean in (0, 3000)
    )
    inertia, expected = (
        book.nearest(rows + mean)[0].sum().item() for book, mean in ((far, 3000), (centred, 0))
    )
    assert inertia == pytest.approx(expected, rel=1e-2)
    assert far.metadata["inertia"] == pytest.approx(inertia, rel=1e-2)


def test_fit_finds_separate_clusters_and_records_how():
    centers = 10 * np.eye(4, 6, dtype=np.float32)
    noise = np.random.default_rng(2).normal(scale=0.01, size=(50, 4, 6))
    features = (centers + noise).reshape(-1, 6).astype(np.float32)
    codebook = fit_codebook(features, k=4, niter=10, nredo=8, seed=3, metadata={"encoder": "none"})
    nearest = np.linalg.norm(codebook.centroids.numpy()[:, None] - centers, axis=-1)
    assert nearest.min(axis=0).max() < 0.01
    recorded = codebook.metadata
    assert (recorded["encoder"], recorded["k"], recorded["dim"], recorded["rows"]) == ("none", 4, 6, 200)
    assert (recorded["seed"], recorded["niter"], recorded["nredo"]) == (3, 10, 8)
    assert recorded["inertia"] == pytest.approx(200 * 6 * 0.01**2, rel=0.1)
    assert recorded["inertia_per_iteration"][-1] == recorded["inertia"]
    assert set(recorded["versions"]) == {"torch", "numpy"}
    assert KMeansOptions(8192) == KMeansOptions(8192, niter=20, nredo=5, max_points_per_centroid=512, seed=0)


NOT_FINITE = np.full((2, 2), np.nan)
REFUSED = [
    (np.zeros((600, 12)), 601, "600 rows, k = 601"),
    (NOT_FINITE, 2, "finite"),
    (torch.zeros(2, 3, 4), 2, "features must be a"),
    (np.zeros(12), 2, "features must be a"),
]


@pytest.mark.parametrize(("features", "k", "noun"), REFUSED)
def test_features_that_cannot_be_clustered_are_refused(features, k, noun):
    with pytest.raises(CodebookError, match=noun):
        fit_codebook(features, k)
