"""k-means on feature shards against faiss in memory; killed, resumed, and shared between processes."""

import re
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from mapet_mm.structures.codebook import Codebook, CodebookError, KMeansOptions
from mapet_mm.tokenizers import kmeans
from mapet_mm.tokenizers.feature_shards import FeatureError, FeatureShards
from mapet_mm.tokenizers.fitting import fit_shards
from mapet_mm.tokenizers.kmeans import cluster_shards

DIM = 24


def make_shards(folder: Path, images: int = 3000, positions: int = 2, clusters: int = 40) -> FeatureShards:
    """Rows around random centres, as an encoder's after its ReLU."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(clusters, DIM)) * 2
    names = [f"{index:05d}.png" for index in range(images)]
    shards = FeatureShards(folder, dict(positions_per_image=positions, dim=DIM), names)
    for number, lacking in enumerate(shards.names):
        rows = len(lacking) * positions
        features = centres[rng.integers(clusters, size=rows)] + rng.normal(size=(rows, DIM))
        shards.write(number, lacking, np.maximum(features, 0).astype(np.float16), {})
    return shards


def all_rows(shards: FeatureShards) -> np.ndarray:
    return np.concatenate([shards.read(number) for number in range(len(shards.rows()))]).astype(np.float32)


@pytest.mark.parametrize("options", [KMeansOptions(50, 12, 3), KMeansOptions(16, 8, 2, 100, seed=3)])
def test_rows_starts_and_inertia_are_those_of_faiss_in_memory(tmp_path, options):
    shards = make_shards(tmp_path)
    centroids, inertia = cluster_shards(shards, options, tmp_path / "state")
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
    undisturbed = fit_shards(shards, options, tmp_path / "undisturbed")
    save, calls = kmeans._save_progress, []

    def killed(*args):
        save(*args)
        calls.append(args)
        if len(calls) % 4 == 0:
            raise KeyboardInterrupt

    bars = []

    class Bar(kmeans.tqdm):
        def __init__(self, **options):
            super().__init__(**options)
            bars.append(self)

    monkeypatch.setattr(kmeans, "_save_progress", killed)
    monkeypatch.setattr(kmeans, "tqdm", Bar)
    interruptions = 0
    while True:
        try:
            resumed = fit_shards(shards, options, tmp_path / "killed")
            break
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions == 4
    assert len(calls) == 18  # no iteration twice
    assert [(bar.initial, bar.n, bar.total) for bar in bars] == [
        (0, 4, 18), (4, 8, 18), (8, 12, 18), (12, 16, 18), (16, 18, 18),
    ]  # fmt: skip
    assert resumed.digest == undisturbed.digest
    assert resumed.metadata["inertia_per_iteration"] == undisturbed.metadata["inertia_per_iteration"]


def test_the_log_says_which_iteration_of_which_start_it_is(tmp_path, capture_log):
    cluster_shards(make_shards(tmp_path / "shards"), KMeansOptions(30, 3, 2), tmp_path / "state")
    said = re.findall(r"k-means start (\d)/2, iteration (\d)/3: inertia \d.*, 0 empty", capture_log())
    assert said == [(start, iteration) for start in "12" for iteration in "123"]


def test_a_checkpoint_of_other_settings_is_not_continued(tmp_path):
    shards = make_shards(tmp_path / "shards")
    cluster_shards(shards, KMeansOptions(30, 4, 2, seed=1), tmp_path / "state")
    centroids, _ = cluster_shards(shards, KMeansOptions(30, 4, 2, seed=2), tmp_path / "state")
    fresh, _ = cluster_shards(shards, KMeansOptions(30, 4, 2, seed=2), tmp_path / "other")
    assert (centroids == fresh).all()


@pytest.mark.parametrize("kept", [0, 100, 2000])
def test_a_truncated_checkpoint_is_refused_by_name(tmp_path, kept):
    shards, state = make_shards(tmp_path / "shards", images=50), tmp_path / "kmeans.pt"
    cluster_shards(shards, KMeansOptions(8, 2, 1), state)
    state.write_bytes(state.read_bytes()[:kept])
    message = r"/kmeans\.pt`, the state of an interrupted k-means, is truncated or damaged \(.*\): remove it"
    with pytest.raises(CodebookError, match=message) as error:
        cluster_shards(shards, KMeansOptions(8, 2, 1), state)
    assert "\n" not in str(error.value)


def test_empty_clusters_are_split(tmp_path):
    names = [f"{index:03d}" for index in range(600)]
    shards = FeatureShards(tmp_path, dict(positions_per_image=1, dim=DIM), names)
    # Four distinct rows and eight starts: some clusters are empty in the first iteration.
    rows = np.random.default_rng(0).normal(size=(4, DIM)).astype(np.float16)
    for number, part in enumerate(shards.names):
        shards.write(number, part, rows[[int(name) % 4 for name in part]], {})
    centroids, inertia = cluster_shards(shards, KMeansOptions(8, 10, 1), tmp_path / "state")
    assert np.isfinite(centroids).all()
    assert len(np.unique(centroids, axis=0)) == 8
    assert inertia[-1] < 0.01


def test_an_iteration_that_changes_nothing_ends_the_start(tmp_path):
    shards = make_shards(tmp_path, images=200)
    _, inertia = cluster_shards(shards, KMeansOptions(3, 200, 1), tmp_path / "state")
    assert len(inertia) < 200
    assert inertia[-1] == inertia[-2] < inertia[-3]


def test_the_start_of_lowest_inertia_is_kept_also_after_one_iteration(tmp_path):
    shards = make_shards(tmp_path)
    # A start draws its rows by the seed and its number.
    alone = [
        cluster_shards(shards, KMeansOptions(30, 1, 1, seed=15486557 * start), tmp_path / f"{start}")
        for start in range(4)
    ]
    centroids, inertia = cluster_shards(shards, KMeansOptions(30, 1, 4), tmp_path / "state")
    best = min(range(4), key=lambda start: alone[start][1])
    assert best not in (0, 3)
    assert inertia == alone[best][1]
    assert (centroids == alone[best][0]).all()


def test_fewer_rows_than_centroids_are_refused(tmp_path):
    shards = make_shards(tmp_path, images=20)
    with pytest.raises(CodebookError, match="40 rows, k = 41"):
        fit_shards(shards, KMeansOptions(41), tmp_path / "state")


def test_features_beyond_float16_are_refused_where_they_are_written(tmp_path):
    shards = FeatureShards(tmp_path, dict(positions_per_image=1, dim=2), ["a", "b"])
    features = np.array([[1.0, 2.0], [7e4, 0.0]])
    with np.errstate(over="ignore"), pytest.raises(FeatureError, match="beyond float16"):
        shards.write(0, ["a", "b"], features.astype(np.float16), {})
    assert shards.lacking(0) == ["a", "b"]


@pytest.mark.parametrize(
    ("scale", "offset", "told_apart"),
    [(1, 0, True), (1, 1000, True), (1, 8000, False), (1e-3, 0, True), (1e-9, 0, False), (0, 3000.1, True)],
)
def test_features_that_float16_does_not_tell_apart_are_refused(tmp_path, scale, offset, told_apart):
    """Before: a codebook of which one id was used. Equal features are the same in any precision."""
    names = [f"{index:03d}" for index in range(50)]
    shards = FeatureShards(tmp_path, dict(positions_per_image=2, dim=DIM), names)
    features = np.random.default_rng(0).normal(size=(100, DIM)).astype(np.float32) * scale + offset
    if not told_apart:
        with pytest.raises(FeatureError, match=r"^float16, .* errors are more than 25% of their var"):
            shards.write(0, names, features, {})
        assert shards.lacking(0) == names
    else:
        shards.write(0, names, features, {})
        assert (all_rows(shards) == features.astype(np.float16)).all()


def test_images_that_are_alike_are_added_to_others(tmp_path):
    """Their spread is only the encoder's noise, which float16 does not keep."""
    shards = FeatureShards(tmp_path, dict(positions_per_image=2, dim=DIM), ["a", "b", "white"])
    shards.write(0, ["a", "b"], np.random.default_rng(0).normal(2, 1, size=(4, DIM)).astype("f4"), {})
    white = np.float32([[2.0001] * DIM, [2.0002 + 2**-10] * DIM])
    shards.write(0, ["white"], white, {})
    assert (shards.read(0)[4:] == white.astype(np.float16)).all()


def test_a_shard_with_other_names_than_rows_is_refused(tmp_path):
    """As one with a line break in a name, of an earlier version; before: other images' features."""
    identity = dict(positions_per_image=2, dim=DIM)
    complete(FeatureShards(tmp_path, identity, ["a\nb", "c"]))
    shards = FeatureShards(tmp_path, identity, ["a", "c"])
    with pytest.raises(FeatureError, match=r"is damaged \(4 rows, 2 of each image, but 3 names\): remove it"):
        shards.lacking(0)


def rows_of(name: str) -> np.ndarray:
    return np.random.default_rng(list(name.encode())).normal(size=(2, DIM)).astype(np.float16)


def complete(shards: FeatureShards, skipped: tuple[str, ...] = ()) -> list[str]:
    """Write what lacks; the names of it."""
    written = []
    for number in range(len(shards.names)):
        names = [name for name in shards.lacking(number) if name not in skipped]
        reasons = {name: "broken" for name in shards.lacking(number) if name in skipped}
        if names or reasons:
            features = (
                np.concatenate([rows_of(name) for name in names]) if names else np.empty((0, DIM), "f2")
            )
            shards.write(number, names, features, reasons)
            written += names
    return written


def test_adding_an_image_costs_one_and_removing_one_costs_none(tmp_path, monkeypatch):
    monkeypatch.setattr("mapet_mm.tokenizers.feature_shards.IMAGES_PER_SHARD", 10)
    names = [f"{index:03d}" for index in range(50)]

    def shards_of(names):
        return FeatureShards(tmp_path / "features", dict(positions_per_image=2, dim=DIM), names)

    assert sorted(complete(shards_of(names))) == names
    assert complete(shards_of([*names, "new"])) == ["new"]
    less = shards_of([name for name in [*names, "new"] if name != "007"])
    assert complete(less) == []
    held = np.concatenate([[rows_of(name) for name in of_shard] for of_shard in less.names]).reshape(-1, DIM)
    assert len(less) == 100
    assert (all_rows(less) == held).all()
    assert less.digest != shards_of(names).digest == shards_of(reversed(names)).digest
    one = shards_of(["007"])  # in shards none of whose other images is asked for
    assert complete(one) == []
    assert (all_rows(one) == rows_of("007")).all()


def test_images_that_cannot_be_decoded_have_no_rows_and_are_not_tried_again(tmp_path):
    names = [f"{index:03d}" for index in range(20)]
    identity = dict(positions_per_image=2, dim=DIM)
    complete(FeatureShards(tmp_path, identity, names), skipped=("003", "011"))
    again = FeatureShards(tmp_path, identity, names)
    assert complete(again) == []
    assert len(again) == 36
    assert (all_rows(again)[6:8] == rows_of("004")).all()


def test_features_of_another_encoder_or_preprocessing_are_kept_apart(tmp_path):
    names = ["a", "b"]
    identity = dict(positions_per_image=2, dim=DIM, preprocessing=dict(mean=[1.0]))
    complete(FeatureShards(tmp_path, identity, names))
    other = FeatureShards(tmp_path, {**identity, "preprocessing": dict(mean=[2.0])}, names)
    assert other.lacking(0) == names
    assert FeatureShards(tmp_path, dict(reversed(identity.items())), names).lacking(0) == []


def _fit(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    if world_size > 1:
        torch.distributed.init_process_group(
            "gloo", f"file://{folder}/meeting_{world_size}", rank=rank, world_size=world_size
        )
    shards = make_shards(Path(folder) / f"shards_{world_size}_{rank}")
    codebook = fit_shards(shards, KMeansOptions(50, 6, 2), Path(folder) / f"state_{world_size}")
    if rank == world_size - 1:
        codebook.save(Path(folder) / f"codebook_{world_size}.safetensors")


def test_any_number_of_processes_give_the_same_bits(tmp_path):
    for world_size in (1, 2, 3):
        mp.start_processes(_fit, (world_size, str(tmp_path)), nprocs=world_size, start_method="fork")
    codebooks = [Codebook.load(tmp_path / f"codebook_{world_size}.safetensors") for world_size in (1, 2, 3)]
    assert len({codebook.digest for codebook in codebooks}) == 1
    curves = [codebook.metadata["inertia_per_iteration"] for codebook in codebooks]
    assert curves[0] == curves[1] == curves[2]
