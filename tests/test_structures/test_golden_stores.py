"""Stores, squares and a codebook of version 0.1.0's formats are read to the same values and written alike.

`tests/data/golden_stores.tar.xz` has a store of 3,000 images, made in two steps, some of which are skipped,
with squares of 16 px; a small one with rows that are still pending; and a codebook. `python
tests/test_structures/test_golden_stores.py FOLDER` writes such files, with ids of their own.
"""

import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from mmcv.transforms import BaseTransform
from mmengine.config import Config

from mapet_mm.registry import TRANSFORMS
from mapet_mm.structures import Codebook, MissingTokensError, TokenStore, extend_store
from mapet_mm.tokenizers.squares import SquareLoader, store_images, verify_images

ARCHIVE = Path(__file__).parents[1] / "data" / "golden_stores.tar.xz"
SIZE = 16
FIRST = [f"train/{index % 7}/{index:05d}.png" for index in range(2500)]
LATER = [f"train/{index % 7}/{index:05d}.png" for index in range(2500, 3000)]
SKIPPED = {row: f"truncated after {row} bytes" for row in range(5, 3000, 97)}
ODD_NAMES = ["猫/ä b.png", "\udcff.png", "a\nb.png", *(f"{number}.png" for number in range(37))]
ODD_WRITTEN = [*range(3, 10), *range(20, 40)]


def grids_of(rows: list[int], vocab_size: int) -> np.ndarray:
    """Ids that follow from the row."""
    first = np.asarray(rows).reshape(-1, 1, 1) * 7919
    return (first + np.arange(4).reshape(2, 2) * 31) % vocab_size


def square_of(row: int) -> np.ndarray:
    y, x, channel = np.ogrid[:SIZE, :SIZE, :3]
    return ((5 * row + 3 * y + x + 7 * channel) % 256).astype(np.uint8)


@TRANSFORMS.register_module()
class GoldenSquare(BaseTransform):
    """In place of decoding: pixels that follow from the image's number."""

    def transform(self, results: dict) -> dict:
        return {**results, "img": square_of(int(Path(results["img_path"]).stem))}


def square_loader(store: Path) -> SquareLoader:
    load_tokens = dict(type="mapet_mm.LoadTokenGrid", store=str(store))
    dataset = dict(type="CustomDataset", pipeline=[dict(type="mapet_mm.GoldenSquare"), load_tokens])
    return SquareLoader.from_config(
        Config(dict(default_scope="mmpretrain", train_dataloader=dict(dataset=dataset)))
    )


def write_stores(folder: Path) -> None:
    """The stores and squares of the archive."""
    preprocessing = {"pipeline": [{"type": "Resize", "scale": 8}], "data_preprocessor": {"mean": [1.5]}}
    TokenStore.create(folder / "tokens", FIRST, 2, 500, "3fa2" * 16, "data", preprocessing)
    store = extend_store(folder / "tokens", LATER)
    rows = [row for row in range(3000) if row not in SKIPPED]
    for some in np.array_split(np.random.default_rng(0).permutation(rows), 3):
        store.write(some, grids_of(some, 500))
    store.write([], np.empty((0, 2, 2), int), SKIPPED)
    store_images(square_loader(folder / "tokens"))
    odd = TokenStore.create(folder / "odd", ODD_NAMES, 2, 70_000, "91c0" * 16)
    odd.write(ODD_WRITTEN, grids_of(ODD_WRITTEN, 70_000), {0: "不", 1: "no image"})


def write_codebook(folder: Path) -> None:
    from mapet_mm.tokenizers import fit_codebook

    rows = np.random.default_rng(0).normal(size=(500, 4))
    fit_codebook(rows, k=8, metadata={"encoder": "by hand"}, niter=5, nredo=2).save(
        folder / "codebook.safetensors"
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Of every file, by its path, with a word in place of the stores' ids; locks are empty."""
    found = {}
    ids = {TokenStore.open(folder / name).id: name for name in ("tokens", "odd")}
    for path in folder.rglob("*"):
        if path.is_file() and path.name != ".lock":
            name, content = str(path.relative_to(folder)), path.read_bytes()
            for store_id, word in ids.items():
                name, content = (
                    name.replace(store_id, word),
                    content.replace(store_id.encode(), word.encode()),
                )
            found[name] = content
    return found


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    with tarfile.open(ARCHIVE) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # early releases of 3.11 have none
        archive.extractall(folder)
    return folder


def test_golden_tokens_are_read_by_row_by_name_and_in_chunks(golden):
    store = TokenStore.open(golden / "tokens")
    store.verify()
    rows = np.setdiff1d(np.arange(3000), list(SKIPPED))
    assert list(store.names) == FIRST + LATER
    assert store.rows(FIRST + LATER).tolist() == list(range(3000))
    assert (store.grids(rows) == grids_of(rows, 500)).all()
    assert all((store[store.names[row]] == grids_of([row], 500)[0]).all() for row in (0, 1024, 2998))
    chunks = list(store.chunks())
    assert np.concatenate([part for part, _ in chunks]).tolist() == rows.tolist()
    assert (np.concatenate([grids for _, grids in chunks]) == grids_of(rows, 500)).all()
    assert store.skipped == {(FIRST + LATER)[row]: reason for row, reason in SKIPPED.items()}
    assert store.missing().size == 0


def test_a_golden_store_with_pending_rows_and_large_ids_is_read(golden):
    store = TokenStore.open(golden / "odd")
    store.verify()
    assert list(store.names) == ODD_NAMES
    assert store.missing().tolist() == [2, *range(10, 20)]
    assert (store.grids(ODD_WRITTEN) == grids_of(ODD_WRITTEN, 70_000)).all()
    assert store.skipped == {ODD_NAMES[0]: "不", ODD_NAMES[1]: "no image"}
    with pytest.raises(MissingTokensError, match="yet"):
        store[ODD_NAMES[2]]


def test_golden_squares_are_read_and_need_no_new_decoding(golden):
    squares, words = verify_images(square_loader(golden / "tokens"), 3000)
    rows = np.setdiff1d(np.arange(3000), list(SKIPPED))
    assert words == f"{len(rows)} squares are those of their images"
    assert (squares.read(rows[::50]) == np.stack([square_of(row) for row in rows[::50].tolist()])).all()
    before = contents(golden)
    assert store_images(square_loader(golden / "tokens"))[1] == 0
    assert contents(golden) == before


def test_the_same_tokens_and_squares_are_written_to_the_same_bytes(golden, tmp_path):
    write_stores(tmp_path)
    expected = contents(golden)
    del expected["codebook.safetensors"]
    assert contents(tmp_path) == expected


def test_the_golden_codebook_is_read_and_saved_and_gives_the_same_tokens(golden, tmp_path):
    codebook = Codebook.load(golden / "codebook.safetensors")
    assert codebook.digest.startswith("8b5722aea67d")
    assert codebook.metadata["encoder"] == "by hand"
    codebook.save(tmp_path / "again")
    again = Codebook.load(
        tmp_path / "again"
    )  # its bytes may differ: safetensors writes metadata in any order
    assert (again.digest, again.metadata) == (codebook.digest, codebook.metadata)
    features = torch.from_numpy(np.random.default_rng(1).normal(size=(12, 4)))
    assert codebook.assign(features).tolist() == [0, 7, 3, 5, 7, 3, 6, 0, 3, 5, 1, 2]


if __name__ == "__main__":
    write_stores(Path(sys.argv[1]))
    write_codebook(Path(sys.argv[1]))
