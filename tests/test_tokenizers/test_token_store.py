"""The token store: what is written is read back by name, interruptions lose nothing, damage is refused."""

import multiprocessing
import os
import pickle
import random
import re
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from mapet_mm.structures import MissingTokensError, TokenStore, TokenStoreError

DIGEST = "3fa2" * 16


def names_of(count, in_order=False) -> list[str]:
    names = sorted(f"train/{i % 7}/{i:05d}.png" for i in range(count))
    if not in_order:
        random.Random(0).shuffle(names)
    return names


def make(path, count=700, grid=(3, 2), vocab_size=500, in_order=False, **kwargs) -> TokenStore:
    return TokenStore.create(path, names_of(count, in_order), grid, vocab_size, DIGEST, **kwargs)


def grids_of(rows, grid=(3, 2), vocab_size=500) -> np.ndarray:
    """A grid that only its row has."""
    return (np.arange(np.prod(grid)).reshape(grid) * 11 + np.asarray(rows)[:, None, None] * 7) % vocab_size


def resident_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


@pytest.mark.parametrize("in_order", [True, False], ids=["names-in-order", "names-shuffled"])
def test_every_grid_is_read_back_under_its_name(tmp_path, in_order):
    """Row i is the i-th name given; names in byte order cost no index of their own."""
    store = make(tmp_path / "tokens", in_order=in_order, data_root="data/digits")
    with safe_open(tmp_path / "tokens" / "generation-0001" / "names.safetensors", "np") as file:
        assert ("rows" in file.keys()) != in_order  # noqa: SIM118, no mapping
    rows = np.random.default_rng(0).permutation(len(store))
    for part in np.array_split(rows, 9):
        store.write(part, grids_of(part))
    again = TokenStore.open(tmp_path / "tokens")
    assert list(again.names) == names_of(700, in_order)
    for row, name in enumerate(again.names):
        assert again[name].dtype == np.uint16
        assert (again[name] == grids_of([row])[0]).all()
        assert again.row(name) == row
        assert again.names[row] == name
    assert (again.grid, again.vocab_size, again.tokenizer) == ((3, 2), 500, DIGEST)
    assert again.data_root == "data/digits"


def test_missing_counts_down_and_ends_empty(tmp_path):
    store = make(tmp_path / "tokens", count=10)
    assert store.missing().tolist() == list(range(10))
    store.write([7, 2], grids_of([7, 2]))
    assert store.missing().tolist() == [0, 1, 3, 4, 5, 6, 8, 9]
    assert store.written().tolist() == [row in (2, 7) for row in range(10)]
    assert len(store) == 10


@pytest.mark.parametrize(
    "name", ["train/0/99999.png", "train", "", "a", "zzz", "rain/0/00000.png", "train/0/00000.pn"]
)
def test_unknown_names_are_not_found(tmp_path, name):
    store = make(tmp_path / "tokens", count=300)
    assert name not in store
    with pytest.raises(MissingTokensError, match=r"tokens` has no image `.*`: run tools/extract_tokens.py"):
        store[name]


def test_names_end_where_the_rows_end(tmp_path):
    names = make(tmp_path / "tokens", count=300).names
    assert (names[-300], names[299]) == (names[0], names[-1])
    for row in (300, -301):
        with pytest.raises(IndexError, match=rf"row {row} of 300 rows"):
            names[row]


def test_a_name_with_a_line_break_does_not_match_two_names(tmp_path):
    store = make(tmp_path / "tokens", count=300)
    assert "\n".join([store.names[4], store.names[5]]) not in store


def test_reading_tokens_not_written_yet_is_one_clear_line(tmp_path):
    store = make(tmp_path / "tokens", count=3)
    name = store.names[1]
    assert name in store
    with pytest.raises(MissingTokensError) as error:
        store[name]
    assert str(error.value) == (
        f"token store `{tmp_path / 'tokens'}` has no tokens for image `{name}` yet: "
        "run tools/extract_tokens.py with the tokenizer's config to complete it"
    )


def test_names_outside_ascii_are_kept(tmp_path):
    names = ["train/猫/ä b.png", "train/\udcff.png", "train/z.png"]
    store = TokenStore.create(tmp_path / "tokens", names, (1, 1), 9, DIGEST)
    store.write(range(3), np.arange(3).reshape(3, 1, 1))
    assert set(store.names) == set(names)
    assert all(store.names[int(store[name][0, 0])] == name for name in names)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "b", "a"], "'a' is given twice"),
        ([], "no image names"),
        (["a", ""], "is empty"),
        (["a\nb"], "line break"),
    ],
)
def test_names_that_cannot_be_rows_are_refused(tmp_path, names, message):
    with pytest.raises(TokenStoreError, match=rf"^token store `{tmp_path}/tokens`: .*{message}"):
        TokenStore.create(tmp_path / "tokens", names, (2, 2), 10, DIGEST)
    assert not (tmp_path / "tokens").exists()


@pytest.mark.parametrize("grid", [(14, 0), (14, 14, 3), (14.5, 14)])
def test_a_grid_that_is_none_is_refused_before_the_store_is_made(tmp_path, grid):
    message = f"grid={grid!r}: one whole number above 0, or two, (height, width)"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TokenStore.create(tmp_path / "tokens", ["a"], grid, 10, DIGEST)
    assert not (tmp_path / "tokens").exists()


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_the_highest_id_fits_the_stored_type(tmp_path, vocab_size, dtype):
    store = TokenStore.create(tmp_path / "tokens", ["a"], (1, 2), vocab_size, DIGEST)
    store.write([0], np.array([[[0, vocab_size - 1]]]))
    assert store["a"].tolist() == [[0, vocab_size - 1]]
    assert store["a"].dtype == dtype


def test_write_refuses_what_does_not_fit(tmp_path):
    store = make(tmp_path / "tokens", count=4)
    good = grids_of([0, 1])
    with pytest.raises(TokenStoreError, match=r"ids from 0 to 499 \(its vocab_size\), got 0 to 500"):
        store.write([0, 1], np.where(good == good.max(), 500, 0))
    with pytest.raises(TokenStoreError, match="got -1 to 4"):
        store.write([0], np.arange(-1, 5).reshape(1, 3, 2))
    with pytest.raises(TokenStoreError, match=r"shape \(2, 3, 2\) for 2 rows, got \(2, 2, 3\)"):
        store.write([0, 1], good.transpose(0, 2, 1))
    with pytest.raises(TokenStoreError, match="rows 0 to 3, got 3 to 4"):
        store.write([3, 4], good)
    with pytest.raises(TokenStoreError, match="integer ids, got float64"):
        store.write([0, 1], good * 1.0)
    assert store.missing().tolist() == [0, 1, 2, 3]


def test_killed_before_its_block_has_its_name_the_rows_are_missing_and_the_rest_is_kept(tmp_path):
    store = make(tmp_path / "tokens", count=8)
    store.write([0, 1], grids_of([0, 1]))

    def write_and_die():
        os.replace = lambda *_: os._exit(9)  # all bytes are on disk, the name is next
        TokenStore.open(tmp_path / "tokens").write([2, 3], grids_of([2, 3]))

    process = multiprocessing.get_context("fork").Process(target=write_and_die)
    process.start()
    process.join()
    assert process.exitcode == 9
    again = TokenStore.open(tmp_path / "tokens")
    assert again.missing().tolist() == [2, 3, 4, 5, 6, 7]
    assert (again[again.names[1]] == grids_of([1])[0]).all()
    with pytest.raises(MissingTokensError):
        again[again.names[2]]
    again.write([2, 3], grids_of([2, 3]))
    assert (again[again.names[3]] == grids_of([3])[0]).all()


def test_a_killed_creation_leaves_no_store_and_does_not_block_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "mapet_mm.utils.atomic_files.os.rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "tokens", count=5)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    assert len(make(tmp_path / "tokens", count=5)) == 5


def test_a_full_disk_is_an_error_and_costs_nothing_that_was_written(tmp_path, monkeypatch):
    store = make(tmp_path / "tokens", count=4)
    store.write([0], grids_of([0]))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mapet_mm.utils.atomic_files.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.write([1], grids_of([1]))
    monkeypatch.undo()
    assert TokenStore.open(tmp_path / "tokens").missing().tolist() == [1, 2, 3]
    assert len(list((tmp_path / "tokens" / "blocks").iterdir())) == 1


def test_creating_over_a_store_is_refused_and_says_how_to_go_on(tmp_path):
    make(tmp_path / "tokens", count=5).write([0], grids_of([0]))
    with pytest.raises(
        TokenStoreError, match=r"same names, grid and tokenizer: continue it with TokenStore\.open"
    ):
        make(tmp_path / "tokens", count=5)
    with pytest.raises(TokenStoreError, match="exists with other grid, names"):
        make(tmp_path / "tokens", count=6, grid=(2, 2))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    with pytest.raises(TokenStoreError, match="folder` exists and is not a token store"):
        make(tmp_path / "folder")
    (tmp_path / "empty").mkdir()
    assert len(make(tmp_path / "empty", count=5)) == 5
    assert TokenStore.open(tmp_path / "tokens").missing().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["generation-0001/names.safetensors", "generation-0002/grids.safetensors"])
@pytest.mark.parametrize("cut", [3, 10**9])
def test_a_truncated_file_is_named(tmp_path, name, cut):
    store = make(tmp_path / "tokens", count=300)
    store.write(range(300), grids_of(range(300)))
    store.seal()
    file = tmp_path / "tokens" / name
    size = file.stat().st_size
    os.truncate(file, max(0, size - cut))
    message = rf"{name}` is damaged \(.*\): restore it from a copy"
    with pytest.raises(TokenStoreError, match=message):
        TokenStore.open(tmp_path / "tokens")
    file.unlink()
    with pytest.raises(TokenStoreError, match=rf"{name}` does not exist: restore it"):
        TokenStore.open(tmp_path / "tokens")


def test_a_damaged_block_is_named_and_can_be_removed(tmp_path):
    store = make(tmp_path / "tokens", count=8)
    store.write(range(4), grids_of(range(4)))
    store.write(range(4, 8), grids_of(range(4, 8)))
    block = min((tmp_path / "tokens" / "blocks").iterdir())
    os.truncate(block, block.stat().st_size - 3)
    with pytest.raises(TokenStoreError, match=rf"{block.name}` is damaged .*: remove it and run"):
        TokenStore.open(tmp_path / "tokens").missing()
    block.unlink()
    assert TokenStore.open(tmp_path / "tokens").missing().tolist() == [0, 1, 2, 3]


def test_a_block_that_changed_after_it_was_written_is_neither_read_nor_sealed(tmp_path):
    store = make(tmp_path / "tokens", count=8)
    store.write(range(8), grids_of(range(8)))
    change_a_bit(tmp_path / "tokens", grids_of(range(8)).astype("<u2").tobytes())
    reader = TokenStore.open(tmp_path / "tokens")
    for use in (reader.seal, lambda: reader[reader.names[3]]):
        with pytest.raises(
            TokenStoreError, match=r"has changed since it was written \(its checksum differs\)"
        ):
            use()


@pytest.mark.parametrize("content", [np.array([2, 5], "<u4").tobytes(), b"broken"], ids=["rows", "skipped"])
def test_a_block_whose_rows_or_reasons_changed_is_not_used(tmp_path, content):
    """Or an image would have another's tokens."""
    store = make(tmp_path / "tokens", count=8)
    store.write([2, 5], grids_of([2, 5]), {3: "broken"})
    change_a_bit(tmp_path / "tokens", content)
    with pytest.raises(TokenStoreError, match=r"has changed since it was written \(its checksum differs\)"):
        TokenStore.open(tmp_path / "tokens").missing()


def test_blocks_without_a_checksum_of_their_rows_are_read(tmp_path):
    """As written before there was one."""
    store = make(tmp_path / "tokens", count=8)
    store.write([2, 5], grids_of([2, 5]))
    block = next((tmp_path / "tokens" / "blocks").iterdir())
    with safe_open(block, "numpy") as file:
        metadata = file.metadata()
    del metadata["rows_sha256"]
    save_file(load_file(block), block, metadata)
    reader = TokenStore.open(tmp_path / "tokens")
    assert reader.missing().tolist() == [0, 1, 3, 4, 6, 7]
    assert (reader[reader.names[5]] == grids_of([5])[0]).all()


def change_a_bit(store: Path, content: bytes) -> None:
    """In the third byte of this content of the store's only block."""
    block = next((store / "blocks").iterdir())
    found = bytearray(block.read_bytes())
    found[found.index(content) + 2] ^= 1
    block.write_bytes(found)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_file_truncated_after_it_was_opened_gives_an_error_not_memory(tmp_path, sealed):
    store = make(tmp_path / "tokens", count=50)
    store.write(range(50), grids_of(range(50)))
    if sealed:
        store.seal()
    reader = TokenStore.open(tmp_path / "tokens")
    last = reader.names[49]
    reader[last]
    (file,) = (tmp_path / "tokens").glob("generation-0002/grids*" if sealed else "blocks/*")
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(TokenStoreError, match=r"is damaged \(truncated since it was opened\)"):
        reader[last]


def test_what_is_no_token_store_is_refused(tmp_path):
    with pytest.raises(TokenStoreError, match=r"none` does not exist: run tools/extract_tokens\.py"):
        TokenStore.open(tmp_path / "none")
    with pytest.raises(TokenStoreError, match=r"is not a token store \(no generation-0001\)"):
        TokenStore.open(tmp_path)
    make(tmp_path / "tokens")
    manifest = tmp_path / "tokens" / "generation-0001" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"version": 3', '"version": 4'))
    with pytest.raises(TokenStoreError, match="is not a token store of version 3"):
        TokenStore.open(tmp_path / "tokens")
    os.truncate(manifest, 20)
    with pytest.raises(TokenStoreError, match=r"manifest.json` is damaged"):
        TokenStore.open(tmp_path / "tokens")


def test_a_store_of_another_tokenizer_is_refused_with_both_digests(tmp_path):
    store = make(tmp_path / "tokens")
    store.require_tokenizer(DIGEST, "the config's codebook")
    with pytest.raises(
        TokenStoreError, match="made by tokenizer 3fa23fa23fa2, but the config's codebook is 91c0"
    ):
        store.require_tokenizer("91c0" * 16, "the config's codebook")


def test_workers_read_a_store_that_was_used_before_the_fork_or_pickled(tmp_path):
    store = make(tmp_path / "tokens", count=400)
    store.write(range(400), grids_of(range(400)))
    names, expected = list(store.names), [int(store[name].sum()) for name in store.names]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_Sum(store), names) == expected
    copy = pickle.loads(pickle.dumps(store))
    assert [int(copy[name].sum()) for name in names] == expected
    assert len(pickle.dumps(store)) < 2000


class _Sum:
    def __init__(self, store):
        self.store = store

    def __call__(self, name):
        return int(self.store[name].sum())


@pytest.mark.parametrize("sealed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_hundred_thousand_images_open_at_once_and_cost_no_memory_per_name(tmp_path, sealed):
    count = 100_000
    store = make(tmp_path / "tokens", count=count, grid=(14, 14))
    for rows in np.array_split(np.arange(count), 20):
        store.write(rows, np.ones((len(rows), 14, 14), dtype=np.uint16))
    if sealed:
        store.seal()
    results = multiprocessing.get_context("fork").SimpleQueue()
    process = multiprocessing.get_context("fork").Process(
        target=_measure, args=(tmp_path / "tokens", results)
    )
    process.start()
    seconds, kib, per_second = results.get()
    process.join()
    assert seconds < 0.1
    assert kib < 5 * 1024
    assert per_second > 10_000


def _measure(path, results) -> None:
    before, start = resident_kib(), time.process_time()  # of a busy machine, this process's share
    store = TokenStore.open(path)
    store[store.names[5]]
    opened = time.process_time() - start
    rows = np.random.default_rng(0).integers(0, len(store), 20_000)
    names = [store.names[row] for row in rows]
    start = time.process_time()
    for name in names:
        store[name]
    elapsed = time.process_time() - start
    results.put((opened, resident_kib() - before, len(names) / elapsed))
