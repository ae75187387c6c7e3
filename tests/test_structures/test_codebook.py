"""The codebook: nearest centroids, k-means, and files that are whole or refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from mapet_mm.structures import codebook as module
from mapet_mm.structures.codebook import Codebook, CodebookError, far_mean


@pytest.fixture
def rows() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(600, 12)).astype(np.float32)


def test_assign_is_the_nearest_centroid_in_float64():
    rng = np.random.default_rng(1)
    centroids, features = rng.normal(size=(50, 300)), rng.normal(size=(7, 9, 300))
    distances = ((features[..., None, :] - centroids) ** 2).sum(axis=-1)
    tokens = Codebook(centroids).assign(torch.tensor(features, dtype=torch.float32))
    assert tokens.dtype == torch.int64
    assert tokens.shape == (7, 9)
    assert (tokens.numpy() == distances.argmin(axis=-1)).all()


@pytest.mark.parametrize(("channels", "mean"), [(96, 30.0), (96, 300.0), (96, 3000.0), (1, 10000.0)])
def test_assign_is_exact_for_features_far_from_the_origin(channels, mean):
    """As a network's in which some channels are large in all images."""
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


def test_points_are_far_if_their_mean_is_ten_standard_deviations_away():
    points = torch.tensor([[-1.0, 0.0], [1.0, 0.0]]).repeat(2, 1)
    assert far_mean(points + torch.tensor([10.0, 0.0])) is None
    assert far_mean(points + torch.tensor([10.02, 0.0])).tolist() == pytest.approx([10.02, 0])


@pytest.mark.parametrize(("elements", "blocks"), [(200, [20, 20, 10]), (9, [1] * 50)])
def test_a_block_has_as_many_rows_as_its_distances_have_room_for(rows, elements, blocks, monkeypatch):
    sizes, codebook = [], Codebook(rows[:10])
    nearest = codebook.nearest
    monkeypatch.setattr(codebook, "nearest", lambda block: sizes.append(len(block)) or nearest(block))
    assert module.BLOCK_ELEMENTS == 64 * 2**20 // 4
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", elements)
    codebook.assign(torch.tensor(rows[:50]))
    assert sizes == blocks


def test_autocast_does_not_blur_the_distances(rows):
    # Two centroids closer than bfloat16 resolves: 1 and 1 + 2^-12.
    codebook = Codebook(np.array([[1.0, 64.0], [1.0 + 2**-12, 64.0]]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tokens = codebook.assign(torch.tensor([[1.0, 64.0], [1.0 + 2**-11, 64.0]]))
    assert tokens.tolist() == [0, 1]


def test_features_that_are_not_finite_have_no_token():
    codebook = Codebook(np.eye(3, 4))
    features = torch.eye(3, 4).repeat(2, 1).reshape(2, 3, 4)
    features[0, 1, 3], features[1, 0, 0], features[1, 2, 2] = float("nan"), float("inf"), -float("inf")
    assert codebook.assign(features).tolist() == [[0, -1, 2], [-1, 1, -1]]


def test_what_is_saved_is_what_is_loaded(tmp_path, rows):
    codebook = Codebook(
        rows[:10], {"encoder": "RN50x64", "rows": 5, "versions": {"faiss": "1"}, "scale": 0.5}
    )
    file = tmp_path / "new" / "folder" / "codebook.safetensors"
    codebook.save(file)
    loaded = Codebook.load(file)
    assert torch.equal(loaded.centroids, codebook.centroids)
    assert loaded.metadata == codebook.metadata
    assert loaded.digest == codebook.digest
    assert (loaded.k, loaded.dim) == (10, 12)
    assert list(file.parent.iterdir()) == [file]


def test_digest_depends_on_values_and_shape_only(rows):
    assert Codebook(rows[:10], {"a": 1}).digest == Codebook(rows[:10].copy()).digest
    assert Codebook(rows[:10]).digest != Codebook(rows[:10].reshape(20, 6)).digest
    changed = rows[:10].copy()
    changed[3, 3] += 1e-3
    assert Codebook(rows[:10]).digest != Codebook(changed).digest
    assert Codebook([[1.0]]).digest.startswith("0b00d2111828b845")  # recorded: stores have it


NAN = np.full((2, 2), np.nan)
REFUSED = [
    (lambda rows: Codebook(np.zeros(3)), "matrix"),
    (lambda rows: Codebook(np.zeros((0, 4))), "matrix"),
    (lambda rows: Codebook(NAN), "NaN"),
    (lambda rows: Codebook(rows[:4]).assign(torch.zeros(3, 4, 5)), "5 channels, the codebook 12"),
    (lambda rows: Codebook(rows[:4]).assign(torch.zeros(3, 24)), "24 channels, the codebook 12"),
]


@pytest.mark.parametrize(("do", "noun"), REFUSED)
def test_a_mistake_is_refused(rows, do, noun):
    with pytest.raises(CodebookError, match=noun):
        do(rows)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _write(metadata: dict[str, str] | None) -> Callable[[Path], None]:
    content = save({"centroids": torch.zeros(2, 2)}, metadata)
    return lambda path: path.write_bytes(content) and None


DAMAGED = [
    (Path.unlink, "cannot be read"),
    (_truncate, "cannot be read"),
    (_write(None), "not a codebook"),
    (_write({"format": "pt"}), "not a codebook"),
    (_write({"format": "mapet_mm.codebook", "encoder": "RN50"}), "cannot be read"),
]


@pytest.mark.parametrize(("damage", "noun"), DAMAGED)
def test_a_file_that_is_not_a_whole_codebook_is_refused_by_name(tmp_path, rows, damage, noun):
    path = tmp_path / "codebook.safetensors"
    Codebook(rows[:10]).save(path)
    damage(path)
    with pytest.raises(CodebookError, match=f"codebook.safetensors. .*{noun}"):
        Codebook.load(path)
