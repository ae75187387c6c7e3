"""k-means by faiss's loop: against faiss in memory, on features in files, and shared between processes."""

from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from faiss.contrib.clustering import DatasetAssign, kmeans

from mapet_mm import tokenizers
from mapet_mm.structures import CodebookError
from mapet_mm.tokenizers import fit_codebook
from mapet_mm.tokenizers.features import SampledFeatures
from mapet_mm.tokenizers.kmeans import KMeansOptions, Points, RowsInMemory, RowsOfImages, cluster

DIM = 24


def make_rows(count: int = 6000, clusters: int = 40) -> np.ndarray:
    """Rows around random centres, as an encoder's after its ReLU."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(clusters, DIM))[rng.integers(clusters, size=count)] * 2
    return np.maximum(rows + rng.normal(size=rows.shape), 0).astype(np.float16)


def stored(folder: Path, per_image: int = 4, skipped: range = range(7, 1000, 50)) -> RowsOfImages:
    """The same rows as those of 1,500 images in files, some of which were skipped."""
    rows = make_rows().reshape(-1, per_image, DIM)
    features = SampledFeatures(folder, [f"{image:04d}.png" for image in range(len(rows))], per_image, DIM)
    for part in range(len(features)):
        images = features.part_range(part)
        slots = [slot for slot, image in enumerate(images) if image not in skipped]
        reasons = {slot: "broken" for slot, image in enumerate(images) if image in skipped}
        features.update(part, slots, [rows[images[slot]] for slot in slots], reasons)
    return RowsOfImages(features)


def fit(rows: np.ndarray, *options, **more) -> tuple:
    return cluster(RowsInMemory(rows), KMeansOptions(*options, **more))


@pytest.mark.parametrize(("k", "niter", "seed"), [(50, 5, 0), (16, 8, 3)])
def test_centroids_are_those_of_faiss_on_a_matrix_in_memory(k, niter, seed):
    centroids, fitted = fit(make_rows(), k, niter, 1, seed=seed)
    expected, stats = kmeans(k, DatasetAssign(make_rows()), niter, seed, verbose=False, return_stats=True)
    assert fitted["inertia_per_iteration"] == pytest.approx([step["obj"] for step in stats], rel=1e-4)
    assert np.allclose(centroids, expected, atol=1e-2)
    assert (fitted["rows"], fitted["rows_clustered"], centroids.dtype) == (6000, 6000, np.float32)


def test_inertia_is_as_low_as_that_of_faiss_with_other_starts():
    """The mean of eight seeds, on rows that were not clustered."""
    rows = make_rows(8000).astype(np.float32)
    known, held_out = rows[:6000], rows[6000:]
    ours, theirs = [], []
    for seed in range(8):
        index = faiss.IndexFlatL2(DIM)
        index.add(fit(known, 64, 10, 1, seed=seed)[0])
        ours.append(index.search(held_out, 1)[0].sum())
        reference = faiss.Kmeans(DIM, 64, niter=10, seed=seed, max_points_per_centroid=512)
        reference.train(known)
        theirs.append(reference.index.search(held_out, 1)[0].sum())
    spread = np.sqrt((np.var(ours, ddof=1) + np.var(theirs, ddof=1)) / 8)
    assert abs(np.mean(ours) - np.mean(theirs)) < 2 * spread


def test_more_rows_than_are_wanted_are_drawn_by_the_seed():
    points = [Points(RowsInMemory(make_rows()), KMeansOptions(16, seed=seed)) for seed in (0, 0, 1)]
    assert [one.count() for one in points] == [6000] * 3
    points = [
        Points(RowsInMemory(make_rows()), KMeansOptions(16, max_points_per_centroid=100, seed=seed))
        for seed in (0, 0, 1)
    ]
    assert [one.count() for one in points] == [1600] * 3
    first, again, other = (one.get_subset(np.arange(1600)) for one in points)
    assert (first == again).all()
    assert (first != other).any()
    assert fit(make_rows(), 16, 2, 1, max_points_per_centroid=100)[1]["rows_clustered"] == 1600


def test_empty_clusters_are_split():
    rows = np.random.default_rng(0).normal(size=(4, DIM)).astype(np.float16)
    centroids, fitted = fit(rows[np.arange(600) % 4], 8, 10, 1)
    assert len(np.unique(centroids, axis=0)) == 8
    assert fitted["inertia"] < 0.01


def test_the_start_of_lowest_inertia_is_kept():
    """By its last iteration: here, another start is the best after the first."""
    # A start draws its rows by the seed and its number.
    alone = [fit(make_rows(), 40, 4, 1, seed=15486557 * start) for start in range(4)]
    centroids, fitted = fit(make_rows(), 40, 4, 4)
    best = min(range(4), key=lambda start: alone[start][1]["inertia"])
    assert fitted["inertia"] == alone[best][1]["inertia"]
    assert (centroids == alone[best][0]).all()
    first = min(range(4), key=lambda start: alone[start][1]["inertia_per_iteration"][0])
    assert first != best


def test_features_in_files_are_clustered_without_the_images_that_have_none(tmp_path):
    rows = stored(tmp_path / "features")
    without = np.delete(make_rows().reshape(-1, 4, DIM), range(7, 1000, 50), axis=0).reshape(-1, DIM)
    blocks = [rows.block(block) for block in range(len(rows.ends) - 1)]
    assert (np.concatenate(blocks) == without).all()
    assert [len(block) for block in blocks] == np.diff(rows.ends).tolist()
    centroids, fitted = cluster(rows, KMeansOptions(30, 4, 1))
    expected, _ = fit(without, 30, 4, 1)
    assert fitted["rows"] == len(without)
    assert np.allclose(centroids, expected, atol=1e-3)


@pytest.mark.parametrize("room", [0, 2, 6])
def test_a_gpu_reads_the_blocks_that_it_has_room_for_once_and_gets_the_same_bits(room, tmp_path, monkeypatch):
    """Of six blocks, in four iterations, and the first one twice before, to say what they cost."""
    rows = stored(tmp_path / "features")
    expected, _ = cluster(rows, KMeansOptions(30, 4, 1))
    read = []
    block_of = RowsOfImages.block
    monkeypatch.setattr(
        RowsOfImages, "block", lambda self, index: read.append(index) or block_of(self, index)
    )
    rooms = iter([True] * room)
    monkeypatch.setattr(tokenizers.kmeans, "has_room", lambda *_: next(rooms, False))
    centroids, _ = cluster(rows, KMeansOptions(30, 4, 1))
    assert (centroids == expected).all()
    of_the_cost = 0 if room else 2
    assert len(read) == of_the_cost + room + 4 * (6 - room)


def test_first_centroids_read_single_rows(tmp_path, monkeypatch):
    rows = stored(tmp_path / "features")
    whole = np.concatenate([rows.block(block) for block in range(len(rows.ends) - 1)])
    monkeypatch.setattr(RowsOfImages, "block", lambda *_: pytest.fail("reads a block"))
    drawn = np.random.default_rng(0).choice(len(whole), 300, replace=False)
    assert (Points(rows, KMeansOptions(300)).get_subset(drawn) == whole[drawn]).all()


def _fit(rank: int, processes: int, folder: str) -> None:
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    if processes > 1:
        meeting = f"file://{folder}/meeting_{processes}"
        torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=processes)
    features = SampledFeatures(
        Path(folder) / "features", [f"{image:04d}.png" for image in range(1500)], 4, DIM
    )
    centroids, fitted = cluster(RowsOfImages(features), KMeansOptions(50, 6, 2))
    if rank == processes - 1:
        np.save(Path(folder) / f"centroids_{processes}.npy", centroids)
        assert len(fitted["inertia_per_iteration"]) == 6


def test_any_number_of_processes_gives_the_same_bits(tmp_path):
    stored(tmp_path / "features")
    for processes in (1, 2, 3):
        mp.start_processes(_fit, (processes, str(tmp_path)), nprocs=processes, start_method="fork")
    alone, *others = (np.load(tmp_path / f"centroids_{processes}.npy") for processes in (1, 2, 3))
    assert all((other == alone).all() for other in others)


def test_the_cost_is_said_first_and_what_faiss_prints_is_not_shown(capsys, monkeypatch):
    said = []
    monkeypatch.setattr(tokenizers.kmeans, "print_log", lambda text, logger: said.append(text))
    fit(make_rows(), 50, 5, 2)
    cost = "clustering 6,000 rows of 24 channels to 50 centroids: 2 starts of 5 iterations, about "
    assert len(said) == 3
    assert said[0].startswith(cost)
    assert said[1].startswith("k-means start 1/2: inertia ")
    assert capsys.readouterr().out == ""


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
    assert set(recorded["versions"]) == {"torch", "numpy", "faiss"}
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
