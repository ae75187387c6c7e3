"""k-means on feature shards against faiss in memory; killed, resumed, and shared between processes."""

from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from mapet_mm.tokenizers import kmeans
from mapet_mm.tokenizers.codebook import Codebook, CodebookError
from mapet_mm.tokenizers.feature_shards import FeatureShards
from mapet_mm.tokenizers.kmeans import KMeansOptions, fit_shards

DIM = 24


def make_shards(folder: Path, images: int = 3000, positions: int = 2, clusters: int = 40) -> FeatureShards:
    """Rows around random centres, as an encoder's after its ReLU."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(clusters, DIM)) * 2
    shards = FeatureShards(folder, dict(images=images, positions_per_image=positions, dim=DIM))
    for number, rows in enumerate(shards.rows()):
        features = centres[rng.integers(clusters, size=len(rows))] + rng.normal(size=(len(rows), DIM))
        shards.write(number, np.maximum(features, 0).astype(np.float16))
    return shards


def all_rows(shards: FeatureShards) -> np.ndarray:
    return np.concatenate([shards.read(number) for number in range(len(shards.rows()))]).astype(np.float32)


@pytest.mark.parametrize("options", [KMeansOptions(50, 12, 3), KMeansOptions(16, 8, 2, 100, seed=3)])
def test_rows_starts_and_inertia_are_those_of_faiss_in_memory(tmp_path, options):
    shards = make_shards(tmp_path)
    centroids, inertia = fit_shards(shards, options, tmp_path / "state")
    # The second case clusters 1,600 of the 6,000 rows, drawn by the seed.
    reference = faiss.Kmeans(
        DIM,
        options.k,
        niter=options.niter,
        nredo=options.nredo,
        max_points_per_centroid=options.max_points_per_centroid,
        seed=options.seed,
    )
    reference.train(all_rows(shards))
    assert inertia[0] > inertia[-1]
    assert inertia[-1] == pytest.approx(reference.obj[-1], rel=1e-4)
    assert np.allclose(np.sort(centroids, axis=0), np.sort(reference.centroids, axis=0), atol=1e-2)


def test_rows_are_taken_in_the_order_asked_for(tmp_path):
    shards = make_shards(tmp_path)
    rows = np.array([5999, 0, 2048, 2047, 3, 2048])
    assert (shards.take(rows) == all_rows(shards)[rows]).all()


def test_killed_in_any_iteration_the_codebook_is_the_same(tmp_path, monkeypatch):
    shards, options = make_shards(tmp_path / "shards"), KMeansOptions(30, 6, 3)
    undisturbed = Codebook.fit_shards(shards, options, tmp_path / "undisturbed")
    save, calls = kmeans._save_progress, []

    def killed(*args):
        save(*args)
        calls.append(args)
        if len(calls) % 4 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(kmeans, "_save_progress", killed)
    interruptions = 0
    while True:
        try:
            resumed = Codebook.fit_shards(shards, options, tmp_path / "killed")
            break
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions == 4
    assert len(calls) == 18  # no iteration twice
    assert resumed.digest == undisturbed.digest
    assert resumed.metadata["inertia_per_iteration"] == undisturbed.metadata["inertia_per_iteration"]


def test_a_checkpoint_of_other_settings_is_not_continued(tmp_path):
    shards = make_shards(tmp_path / "shards")
    fit_shards(shards, KMeansOptions(30, 4, 2, seed=1), tmp_path / "state")
    centroids, _ = fit_shards(shards, KMeansOptions(30, 4, 2, seed=2), tmp_path / "state")
    fresh, _ = fit_shards(shards, KMeansOptions(30, 4, 2, seed=2), tmp_path / "other")
    assert (centroids == fresh).all()


def test_empty_clusters_are_split(tmp_path):
    shards = FeatureShards(tmp_path, dict(images=600, positions_per_image=1, dim=DIM))
    # Four distinct rows and eight starts: some clusters are empty in the first iteration.
    rows = np.random.default_rng(0).normal(size=(4, DIM)).astype(np.float16)
    for number, part in enumerate(shards.rows()):
        shards.write(number, rows[np.asarray(part) % 4])
    centroids, inertia = fit_shards(shards, KMeansOptions(8, 10, 1), tmp_path / "state")
    assert np.isfinite(centroids).all()
    assert len(np.unique(centroids, axis=0)) == 8
    assert inertia[-1] < 0.01


def test_an_iteration_that_changes_nothing_ends_the_start(tmp_path):
    shards = make_shards(tmp_path, images=200)
    _, inertia = fit_shards(shards, KMeansOptions(3, 200, 1), tmp_path / "state")
    assert len(inertia) < 200
    assert inertia[-1] == inertia[-2] < inertia[-3]


def test_fewer_rows_than_centroids_are_refused(tmp_path):
    shards = make_shards(tmp_path, images=20)
    with pytest.raises(CodebookError, match="40 rows, k = 41"):
        Codebook.fit_shards(shards, KMeansOptions(41), tmp_path / "state")


def test_features_beyond_float16_are_refused_where_they_are_written(tmp_path):
    shards = FeatureShards(tmp_path, dict(images=2, positions_per_image=1, dim=2))
    features = np.array([[1.0, 2.0], [7e4, 0.0]])
    with np.errstate(over="ignore"), pytest.raises(ValueError, match="beyond float16"):
        shards.write(0, features.astype(np.float16))
    assert shards.missing() == [0]


def _fit(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    if world_size > 1:
        torch.distributed.init_process_group(
            "gloo", f"file://{folder}/meeting_{world_size}", rank=rank, world_size=world_size
        )
    shards = make_shards(Path(folder) / f"shards_{world_size}_{rank}")
    codebook = Codebook.fit_shards(shards, KMeansOptions(50, 6, 2), Path(folder) / f"state_{world_size}")
    if rank == world_size - 1:
        codebook.save(Path(folder) / f"codebook_{world_size}.safetensors")


def test_any_number_of_processes_give_the_same_bits(tmp_path):
    for world_size in (1, 2, 3):
        mp.start_processes(_fit, (world_size, str(tmp_path)), nprocs=world_size, start_method="fork")
    codebooks = [Codebook.load(tmp_path / f"codebook_{world_size}.safetensors") for world_size in (1, 2, 3)]
    assert len({codebook.digest for codebook in codebooks}) == 1
    curves = [codebook.metadata["inertia_per_iteration"] for codebook in codebooks]
    assert curves[0] == curves[1] == curves[2]
