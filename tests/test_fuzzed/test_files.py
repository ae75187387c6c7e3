"""Stores and codebooks of any content come back, and damaged files of every kind are one clear error."""

import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from mapet_mm.engine.runners.resume import require_checkpoint
from mapet_mm.tokenizers import Codebook, TokenStore, TokenStoreError, extend_store
from mapet_mm.tokenizers.feature_shards import FeatureShards
from mapet_mm.utils.errors import UserError
from mapet_mm.weight_files import read_weights

# Of a path below a folder: any text without separators at its ends.
part = st.text(st.characters(exclude_characters="/\0\n", exclude_categories=("Cs",)), min_size=1, max_size=8)
name = st.lists(part.filter(lambda text: text not in (".", "..")), min_size=1, max_size=3).map("/".join)


@given(
    st.data(),
    st.lists(name, min_size=1, max_size=12, unique=True),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([1, 2, 100, 65_536, 65_537, 2**20]),
)
def test_a_store_gives_back_what_was_written(data, names, rows, columns, vocab_size):
    """Any names, grids and ids, in any number of writes, extended, sealed or not."""
    rng = np.random.default_rng(0)
    expected = {one: rng.integers(vocab_size, size=(rows, columns)) for one in names}
    first = data.draw(st.integers(1, len(names)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "store")
        TokenStore.create(path, names[:first], (rows, columns), vocab_size, "test", folder)
        if first < len(names):
            extend_store(path, names[first:])
        store = TokenStore.open(path)
        order = data.draw(st.permutations(names))
        cut = data.draw(st.integers(0, len(names)))
        for batch in (order[:cut], order[cut:]):
            if batch:
                store.write([store.row(one) for one in batch], np.stack([expected[one] for one in batch]))
        if data.draw(st.booleans()):
            store.seal()
            store.verify_checksums()
        again = TokenStore.open(path)
        assert sorted(again.names) == sorted(names)
        assert not again.missing().size
        for one in names:
            assert np.array_equal(again[one], expected[one])
        with pytest.raises(TokenStoreError):
            again[names[0] + "?"]


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_a_codebook_assigns_the_nearest_centroid(k, dim, count, seed):
    rng = np.random.default_rng(seed)
    book = Codebook(rng.standard_normal((k, dim)), {"text": "üñ\n", "k": k})
    features = torch.from_numpy(rng.standard_normal((count, dim)).astype(np.float32))
    distances = torch.cdist(features.double(), torch.as_tensor(np.asarray(book.centroids)).double())
    chosen = distances.gather(1, book.assign(features).long()[:, None])[:, 0]
    torch.testing.assert_close(chosen, distances.min(1).values, rtol=1e-4, atol=1e-5)
    with tempfile.TemporaryDirectory() as folder:
        book.save(Path(folder, "book"))
        again = Codebook.load(Path(folder, "book"))
    assert again.digest == book.digest
    assert again.metadata == book.metadata


# --- damage ----------------------------------------------------------------------------------------------

IDENTITY = {"encoder": "x", "dim": 3, "positions_per_image": 2}
WEIGHTS = {"a.weight": torch.arange(12.0).view(3, 4), "b": torch.ones(2, dtype=torch.int64)}


def make_store(folder: Path, sealed: bool) -> Path:
    store = TokenStore.create(folder / "store", ["x/1.png", "y.png"], (2, 3), 9, "digest", str(folder))
    store.write([0, 1], np.arange(12).reshape(2, 2, 3) % 9)
    if sealed:
        store.seal()
    return folder / "store"


def read_store(path: Path) -> None:
    store = TokenStore.open(path)
    grids = [store[one] for one in store.names]
    store.missing(), store.skipped
    if store.sealed:
        store.verify_checksums()
    assert all(grid.shape == store.grid for grid in grids)


def make_codebook(folder: Path) -> Path:
    Codebook(np.eye(3, 4), {"encoder": "RN50", "seed": 0}).save(folder / "book.safetensors")
    return folder / "book.safetensors"


def make_checkpoint(folder: Path, **options) -> Path:
    torch.save({"state_dict": WEIGHTS, "meta": {"epoch": 1}}, folder / "epoch_1.pth", **options)
    return folder / "epoch_1.pth"


def make_safetensors(folder: Path) -> Path:
    save_file(WEIGHTS, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def make_features(folder: Path) -> Path:
    shards = FeatureShards(folder / "features", IDENTITY, ["a.png", "b.png"])
    shards.write(0, ["a.png", "b.png"], np.ones((4, 3), np.float16), {})
    return folder / "features"


def read_features(path: Path) -> None:
    shards = FeatureShards(path, IDENTITY, ["a.png", "b.png"])
    if not shards.lacking(0):
        shards.read(0), shards.digest


READERS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    "sealed store": (lambda folder: make_store(folder, True), read_store),
    "store of blocks": (lambda folder: make_store(folder, False), read_store),
    "codebook": (make_codebook, Codebook.load),
    "checkpoint": (make_checkpoint, lambda path: require_checkpoint("checkpoint", str(path))),
    "checkpoint of old": (
        lambda folder: make_checkpoint(folder, _use_new_zipfile_serialization=False),
        lambda path: require_checkpoint("checkpoint", str(path)),
    ),
    "weights": (make_checkpoint, read_weights),
    "weights of old": (
        lambda folder: make_checkpoint(folder, _use_new_zipfile_serialization=False),
        read_weights,
    ),
    "safetensors": (make_safetensors, read_weights),
    "features": (make_features, read_features),
}


@st.composite
def damages(draw) -> Callable[[bytes], bytes]:
    """Bytes are changed, cut off, taken out, put in, or written twice."""
    kind = draw(st.sampled_from(["flip", "flip", "cut", "take out", "put in", "zeros", "empty", "other"]))
    place, number = draw(st.floats(0, 1)), draw(st.integers(1, 255))

    def damaged(content: bytes) -> bytes:
        at = int(place * max(0, len(content) - 1))
        changed = bytearray(content)
        if kind == "flip" and changed:
            changed[at] ^= number
        elif kind == "cut":
            del changed[at:]
        elif kind == "take out":
            del changed[at : at + number]
        elif kind == "put in":
            changed[at:at] = bytes([number]) * number
        elif kind == "zeros":
            changed[at : at + number] = bytes(min(number, len(changed) - at))
        return {"empty": b"", "other": b"PK\x03\x04" + content}.get(kind, bytes(changed))

    return damaged


@pytest.mark.parametrize("kind", READERS)
@given(data=st.data())
def test_a_damaged_file_is_one_clear_error(kind, data):
    """Or the file is as good as before: nothing else is raised, and nothing hangs."""
    make, read = READERS[kind]
    with tempfile.TemporaryDirectory() as folder:
        path = make(Path(folder))
        read(path)
        files = sorted(one for one in (path.rglob("*") if path.is_dir() else [path]) if one.is_file())
        file = data.draw(st.sampled_from(range(len(files))))
        damage = data.draw(damages())
        files[file].write_bytes(damage(files[file].read_bytes()))
        said = None
        try:
            read(path)
        except (UserError, ValueError, FileNotFoundError) as error:
            said = str(error)
        if said is not None:
            assert path.name in said or files[file].name in said
            assert "\n" not in said, said


def test_the_files_are_of_the_kinds_that_they_are_called(tmp_path):
    """Otherwise nothing would have been damaged."""
    for kind, (make, _) in READERS.items():
        folder = tmp_path / kind.replace(" ", "-")
        folder.mkdir()
        path = make(folder)
        assert path.exists()
    assert zipfile.is_zipfile(tmp_path / "checkpoint/epoch_1.pth")
    assert not zipfile.is_zipfile(tmp_path / "checkpoint-of-old/epoch_1.pth")
