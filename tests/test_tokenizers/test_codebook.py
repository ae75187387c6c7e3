"""The codebook: nearest centroids, k-means, and files that are whole or refused."""

import inspect
import warnings
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import save

from mapet_mm.structures.codebook import Codebook, CodebookError, KMeansOptions


@pytest.fixture
def rows() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(600, 12)).astype(np.float32)


def test_assign_is_the_nearest_centroid_in_float64():
    rng = np.random.default_rng(1)
    centroids, features = rng.normal(size=(50, 24)), rng.normal(size=(7, 9, 24))
    distances = ((features[..., None, :] - centroids) ** 2).sum(axis=-1)
    tokens = Codebook(centroids).assign(torch.tensor(features, dtype=torch.float32))
    assert tokens.dtype == torch.int64
    assert tokens.shape == (7, 9)
    assert (tokens.numpy() == distances.argmin(axis=-1)).all()


@pytest.mark.parametrize(("channels", "mean"), [(96, 30.0), (96, 300.0), (96, 3000.0), (1, 10000.0)])
def test_assign_is_exact_for_features_far_from_the_origin(channels, mean):
    """As a network's in which some channels are large in all images. Before: 0.3, 19, 99 and 94 % wrong."""
    generator = torch.Generator().manual_seed(0)
    far = torch.zeros(96)
    far[:channels] = mean
    codebook = Codebook(torch.randn(256, 96, generator=generator) + far)
    rows = torch.randn(1000, 96, generator=generator) + far
    distances, ids = codebook.nearest(rows)
    differences = rows.double()[:, None] - codebook.centroids.double()
    expected, nearest = differences.square().sum(2).min(dim=1)
    assert torch.equal(codebook.assign(rows), nearest)
    assert torch.equal(ids, nearest)
    torch.testing.assert_close(distances, expected, rtol=1e-5, atol=0)


@pytest.fixture
def warnings_are_errors():
    """PyTorch's too, each time and not only the first."""
    torch.set_warn_always(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    torch.set_warn_always(False)


@pytest.mark.parametrize("mean", [0, 3000])
def test_read_only_features_are_taken_without_a_warning(mean, rows, tmp_path, warnings_are_errors):
    """As `np.load(mmap_mode="r")` gives them."""
    np.save(tmp_path / "features.npy", rows + np.float32(mean))
    read = np.load(tmp_path / "features.npy", mmap_mode="r")
    books = [Codebook.fit(features, k=4, niter=2) for features in (read, read.copy())]
    assert torch.equal(books[0].centroids, books[1].centroids)


def test_codebooks_of_features_far_from_the_origin_are_as_good_as_of_centred_ones():
    """faiss's products in float32 would not tell the rows apart: 2.8 times the inertia before."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 96, generator=generator).repeat(40, 1)
    rows += 0.5 * torch.randn(rows.shape, generator=generator)
    centred, far = (Codebook.fit((rows + mean).numpy(), k=64, niter=10, nredo=1) for mean in (0, 3000))
    inertia, expected = (
        book.nearest(rows + mean)[0].sum().item() for book, mean in ((far, 3000), (centred, 0))
    )
    assert inertia == pytest.approx(expected, rel=1e-2)
    assert far.metadata["inertia"] == pytest.approx(inertia, rel=1e-2)


def test_assign_gives_the_same_tokens_in_blocks(monkeypatch, rows):
    codebook = Codebook(rows[:40])
    whole = codebook.assign(torch.from_numpy(rows))
    monkeypatch.setattr("mapet_mm.structures.codebook.BLOCK_ELEMENTS", 40 * 7)
    assert torch.equal(codebook.assign(torch.from_numpy(rows)), whole)
    assert torch.equal(whole[:40], torch.arange(40))


def test_autocast_does_not_blur_the_distances(rows):
    # Two centroids closer than bfloat16 resolves: 1 and 1 + 2^-12.
    codebook = Codebook(np.array([[1.0, 64.0], [1.0 + 2**-12, 64.0]]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tokens = codebook.assign(torch.tensor([[1.0, 64.0], [1.0 + 2**-11, 64.0]]))
    assert tokens.tolist() == [0, 1]


def test_features_that_are_not_finite_have_no_token():
    """Before: token 0, as if they were near the first centroid."""
    codebook = Codebook(np.eye(3, 4))
    features = torch.eye(3, 4).repeat(2, 1).reshape(2, 3, 4)
    features[0, 1, 3], features[1, 0, 0], features[1, 2, 2] = float("nan"), float("inf"), -float("inf")
    assert codebook.assign(features).tolist() == [[0, -1, 2], [-1, 1, -1]]


def test_assign_refuses_features_of_another_width(rows):
    with pytest.raises(CodebookError, match="features have 5 channels, the codebook 12"):
        Codebook(rows[:4]).assign(torch.zeros(3, 4, 5))


def test_fit_finds_separate_clusters_and_records_how():
    centers = 10 * np.eye(4, 6, dtype=np.float32)
    noise = np.random.default_rng(2).normal(scale=0.01, size=(50, 4, 6))
    features = (centers + noise).reshape(-1, 6).astype(np.float32)
    codebook = Codebook.fit(features, k=4, niter=10, nredo=8, seed=3, metadata={"encoder": "none"})
    nearest = np.linalg.norm(codebook.centroids.numpy()[:, None] - centers, axis=-1)
    assert nearest.min(axis=0).max() < 0.01
    recorded = codebook.metadata
    assert (recorded["encoder"], recorded["k"], recorded["dim"], recorded["rows"]) == ("none", 4, 6, 200)
    assert (recorded["seed"], recorded["niter"], recorded["nredo"]) == (3, 10, 8)
    assert recorded["inertia"] == pytest.approx(200 * 6 * 0.01**2, rel=0.1)
    assert recorded["inertia_per_iteration"][-1] == recorded["inertia"]
    assert "faiss" in recorded["versions"]


def test_settings_left_out_are_the_same_in_memory_and_out_of_it():
    options = asdict(KMeansOptions(8))
    assert options == dict(k=8, niter=20, nredo=5, max_points_per_centroid=512, seed=0)
    defaults = {name: p.default for name, p in inspect.signature(Codebook.fit).parameters.items()}
    assert {name: defaults[name] for name in options if name != "k"} == {
        name: value for name, value in options.items() if name != "k"
    }


def test_the_inertia_curve_is_the_best_redo_alone_and_falls(rows):
    curve = Codebook.fit(rows, k=16, niter=6, nredo=5).metadata["inertia_per_iteration"]
    assert 2 <= len(curve) <= 6
    assert all(later <= earlier for earlier, later in pairwise(curve))


def test_inertia_is_that_of_the_centroids_kept(rows):
    codebook = Codebook.fit(rows, k=8, niter=60, nredo=3)
    features = torch.from_numpy(rows)
    nearest = codebook.centroids[codebook.assign(features)]
    assert codebook.metadata["inertia"] == pytest.approx(((features - nearest) ** 2).sum().item(), rel=1e-4)


def test_the_seed_decides_the_codebook(rows):
    first, again, other = (Codebook.fit(rows, k=16, seed=seed) for seed in (0, 0, 1))
    assert first.digest == again.digest != other.digest


def test_fit_refuses_fewer_rows_than_centroids(rows):
    with pytest.raises(CodebookError, match=r"600 rows, k = 601; sample more images"):
        Codebook.fit(rows, k=601)


@pytest.mark.parametrize("setting", ["k", "niter", "nredo", "max_points_per_centroid"])
def test_fit_refuses_settings_below_one_by_name(rows, setting):
    with pytest.raises(CodebookError, match=rf"^k-means with {setting}=0: 1 is the least$"):
        Codebook.fit(rows, **({"k": 3} | {setting: 0}))


def test_fit_refuses_features_that_are_not_finite(rows):
    rows[17, 3] = np.nan
    with pytest.raises(CodebookError, match="NaN or infinity"):
        Codebook.fit(rows, k=4)


def test_what_is_saved_is_what_is_loaded(tmp_path, rows):
    codebook = Codebook(
        rows[:10], {"encoder": "RN50x64", "rows": 5, "versions": {"faiss": "1"}, "scale": 0.5}
    )
    codebook.save(tmp_path / "new" / "codebook.safetensors")
    loaded = Codebook.load(tmp_path / "new" / "codebook.safetensors")
    assert torch.equal(loaded.centroids, codebook.centroids)
    assert loaded.metadata == codebook.metadata
    assert loaded.digest == codebook.digest
    assert (loaded.k, loaded.dim) == (10, 12)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["codebook.safetensors"]


def test_a_failed_save_leaves_the_old_codebook(tmp_path, rows, monkeypatch):
    path = tmp_path / "codebook.safetensors"
    Codebook(rows[:10]).save(path)
    before = path.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mapet_mm.utils.atomic_files.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        Codebook(rows[:20]).save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_digest_depends_on_values_and_shape_only(rows):
    assert Codebook(rows[:10], {"a": 1}).digest == Codebook(rows[:10].copy()).digest
    assert Codebook(rows[:10]).digest != Codebook(rows[:10].reshape(20, 6)).digest
    changed = rows[:10].copy()
    changed[3, 3] += 1e-3
    assert Codebook(rows[:10]).digest != Codebook(changed).digest


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_a_truncated_codebook_is_refused_by_name(tmp_path, rows, kept):
    path = tmp_path / "codebook.safetensors"
    Codebook(rows[:10]).save(path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CodebookError, match=r"codebook\.safetensors` is truncated or damaged") as error:
        Codebook.load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("number", "header", "reason"),
    [
        (np.nan, "1", "centroids hold NaN or infinity: check the features they were fitted on"),
        (0.0, "", "Expecting value: line 1 column 1 (char 0)"),
    ],
)
def test_a_damaged_codebook_is_refused_by_name(tmp_path, number, header, reason):
    path = tmp_path / "codebook.safetensors"
    metadata = {"format": "mapet_mm.codebook", "k": header}
    path.write_bytes(save({"centroids": torch.full((2, 3), number)}, metadata=metadata))
    with pytest.raises(CodebookError) as error:
        Codebook.load(path)
    remedy = "fit one with tools/fit_codebook.py or correct the path in the config"
    assert str(error.value) == f"codebook `{path}` is damaged ({reason}): {remedy}"


def test_features_that_are_no_rows_are_refused():
    with pytest.raises(CodebookError, match=r"\(rows, D\) matrix, got shape \(2, 3, 4\)"):
        Codebook.fit(torch.zeros(2, 3, 4), k=2)


def test_other_files_and_missing_ones_are_refused_by_name(tmp_path):
    from safetensors.torch import save_file

    save_file({"centroids": torch.zeros(2, 2)}, tmp_path / "weights.safetensors")
    with pytest.raises(
        CodebookError, match=r"weights\.safetensors` is a safetensors file but not a mapet_mm"
    ):
        Codebook.load(tmp_path / "weights.safetensors")
    with pytest.raises(CodebookError, match=r"none\.safetensors` does not exist: fit one"):
        Codebook.load(tmp_path / "none.safetensors")


def test_centroids_must_be_a_finite_matrix():
    with pytest.raises(CodebookError, match=r"must be a \(k, D\) matrix, got shape \(3,\)"):
        Codebook(np.zeros(3))
    with pytest.raises(CodebookError, match="NaN"):
        Codebook(np.full((2, 2), np.nan))
