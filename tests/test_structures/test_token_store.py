"""The token store: what is written is read back by name; kills, damage and replacement deceive nobody."""

import errno
import json
import multiprocessing
import os
import pickle
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError

from mapet_mm.structures import (
    MissingTokensError,
    TokenStore,
    TokenStoreError,
    extend_store,
    merge_stores,
    parts,
)
from mapet_mm.structures.names import StoredNames
from mapet_mm.structures.token_store import PART_ROWS

DIGEST, GRID = "3fa2" * 16, (2, 3)
FORK = multiprocessing.get_context("fork")


def names_of(count: int) -> list[str]:
    names = [f"train/{index % 7}/{index:05d}.png" for index in range(count)]
    random.Random(0).shuffle(names)
    return names


def grid_of(name: str) -> np.ndarray:
    """A grid that follows from the name."""
    return np.random.default_rng(list(name.encode())).integers(500, size=GRID).astype(np.uint16)


def make(path: Path, names: list[str], tokenizer: str = DIGEST, data_root: str = "data") -> TokenStore:
    return TokenStore.create(path, names, GRID, 500, tokenizer, data_root)


def fill(store: TokenStore, rows=None) -> TokenStore:
    rows = store.missing() if rows is None else rows
    store.write(rows, np.array([grid_of(store.names[row]) for row in rows]))
    return store


def holds(store: TokenStore, names: list[str]) -> bool:
    return all((store[name] == grid_of(name)).all() for name in names)


def part_of(store: TokenStore, number: int = 0) -> Path:
    return store.path / "parts" / f"{number:05d}-{store.id}.safetensors"


def test_what_is_written_in_any_order_is_read_back_by_name(tmp_path):
    names = names_of(PART_ROWS + 300)
    store = make(tmp_path / "a", names)
    for rows in np.array_split(np.random.default_rng(0).permutation(len(names)), 4):
        fill(store, rows)
    again = TokenStore.open(tmp_path / "a")
    again.verify()
    assert holds(again, names)
    assert list(again.names) == names
    assert [again.row(name) for name in names[:50]] == list(range(50))
    assert again.rows([names[7], "unknown", names[1200]]).tolist() == [7, -1, 1200]
    assert (again.names[-1], again.names[3:6], again.names[5:5]) == (names[-1], names[3:6], [])
    assert (again.grid, again.vocab_size, again.tokenizer, again.data_root) == (GRID, 500, DIGEST, "data")
    assert again[names[0]].dtype == np.uint16
    shutil.copyfile(part_of(store), part_of(store, 1))
    with pytest.raises(TokenStoreError, match="other images"):
        again.verify()


def test_missing_rows_count_down_and_skipped_ones_have_a_reason(tmp_path):
    store = make(tmp_path / "a", ["a", "b", "c", "d"])
    store.write([2], [grid_of("c")], {0: "truncated"})
    assert store.missing().tolist() == [1, 3]
    assert store.written().tolist() == [False, False, True, False]
    assert [rows.tolist() for rows, _ in store.chunks()] == [[2]]
    assert store.skipped == {"a": "truncated"}
    with pytest.raises(MissingTokensError, match=r"`a` that it skipped \(truncated"):
        store["a"]
    fill(store, [0])
    assert (store.skipped, holds(store, ["a", "c"])) == ({}, True)


@pytest.mark.parametrize("name", ["train", "", "zzz", "rain/0/00000.png", "a\nb"])
def test_unknown_names_are_not_found(tmp_path, name):
    store = make(tmp_path / "a", names_of(300))
    assert name not in store
    with pytest.raises(MissingTokensError, match="has no image"):
        store[name]


def test_names_outside_ascii_are_kept(tmp_path):
    names = ["train/猫/ä b.png", "train/\udcff.png", "a\nb.png"]
    store = make(tmp_path / "a", names)
    store.write(range(3), np.stack([np.full(GRID, row) for row in range(3)]), {})
    assert list(store.names) == names
    assert [store[name][0, 0] for name in names] == [0, 1, 2]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_the_highest_id_fits_the_stored_type(tmp_path, vocab_size, dtype):
    store = TokenStore.create(tmp_path / "a", ["a"], (1, 2), vocab_size, DIGEST)
    store.write([0], np.array([[[0, vocab_size - 1]]]))
    assert (store["a"].tolist(), store["a"].dtype) == ([[0, vocab_size - 1]], dtype)


ZEROS = np.zeros((1, *GRID), int)
REFUSED = [
    (lambda path: make(path / "b", ["a", "b", "a"]), "'a' is given twice"),
    (lambda path: make(path / "b", []), "no image names"),
    (lambda path: make(path / "a", ["a"]), "a` exists"),
    (lambda path: TokenStore.open(path / "none"), "does not exist"),
    (lambda path: TokenStore.open(path), "is not a token store"),
    (lambda path: TokenStore.open(path / "a").write([0], ZEROS + 500), "ids from 0 to 499"),
    (lambda path: TokenStore.open(path / "a").write([0], ZEROS - 1), "ids from 0 to 499"),
    (lambda path: TokenStore.open(path / "a").write([0], ZEROS * 1.0), "integer ids"),
    (lambda path: TokenStore.open(path / "a").write([0, 1], ZEROS), "shape"),
    (lambda path: TokenStore.open(path / "a").write([2], ZEROS), "rows 0 to 1"),
    (lambda path: TokenStore.open(path / "a").write([-1], ZEROS), "rows 0 to 1"),
    (lambda path: TokenStore.open(path / "a").require_tokenizer("91c0" * 16, "the codebook"), "3fa2.*91c0"),
    (lambda path: extend_store(path / "a", ["c", "b"]), "'b' is given twice"),
    (lambda path: merge_stores(path / "m", [TokenStore.open(path / "a")] * 2), "'a' is given twice"),
    (lambda path: merge_stores(path / "a", [TokenStore.open(path / "a")]), "exists"),
]


@pytest.mark.parametrize(("do", "noun"), REFUSED)
def test_a_mistake_is_refused_and_writes_nothing(tmp_path, do, noun):
    store = make(tmp_path / "a", ["a", "b"])
    with pytest.raises(ValueError, match=noun) as error:
        do(tmp_path)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert store.missing().tolist() == [0, 1]


def test_a_store_of_an_older_version_is_not_read(tmp_path):
    manifest = make(tmp_path / "a", ["a"]).path / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 3}))
    with pytest.raises(TokenStoreError, match="version"):
        TokenStore.open(tmp_path / "a")


def run_in_a_fork(work) -> int:
    process = FORK.Process(target=work)
    process.start()
    process.join()
    return process.exitcode


def test_a_write_killed_before_its_file_has_its_name_costs_only_its_rows(tmp_path):
    store = fill(make(tmp_path / "a", names_of(8)), [0, 1])

    def write_and_die() -> None:
        os.replace = lambda *_: os._exit(9)  # all bytes are on disk, the name is next
        fill(TokenStore.open(tmp_path / "a"), [2, 3])

    assert run_in_a_fork(write_and_die) == 9
    again = TokenStore.open(tmp_path / "a")
    assert again.missing().tolist() == [2, 3, 4, 5, 6, 7]
    assert holds(again, store.names[:2])


def test_a_full_disk_is_named_and_costs_only_the_rows(tmp_path, monkeypatch):
    store = fill(make(tmp_path / "a", names_of(8)), [0, 1])

    def full(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr(parts, "save_file", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*/parts/00000-") as raised:
            fill(store, [2, 3])
    assert raised.value.errno == errno.ENOSPC
    assert TokenStore.open(tmp_path / "a").missing().tolist() == [2, 3, 4, 5, 6, 7]
    assert holds(fill(store), store.names)


def test_several_writers_of_one_part_lose_no_rows(tmp_path):
    """Each writes every fourth row, one by one."""
    names = names_of(64)
    make(tmp_path / "a", names)

    def write(first: int) -> None:
        store = TokenStore.open(tmp_path / "a")
        for row in range(first, 64, 4):
            fill(store, [row])

    writers = [FORK.Process(target=write, args=(first,)) for first in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    store = TokenStore.open(tmp_path / "a")
    assert not store.missing().size
    assert holds(store, names)


REPLACED = {
    "removed": lambda path: None,
    "another codebook": lambda path: fill(make(path, names_of(20), tokenizer="91c0" * 16)),
    "another order": lambda path: fill(make(path, sorted(names_of(20)))),
}


@pytest.mark.parametrize("remake", REPLACED.values(), ids=REPLACED)
def test_a_store_that_is_replaced_stops_its_writers_and_gives_readers_what_they_have_open(tmp_path, remake):
    """An extraction that was suspended while its store was made anew, and a training's workers."""
    names = names_of(20)
    store = fill(make(tmp_path / "a", names), range(10))
    assert holds(store, names[:10])
    worker = pickle.loads(pickle.dumps(store))
    shutil.rmtree(tmp_path / "a")
    remade = remake(tmp_path / "a")
    for use in (
        lambda: worker[names[0]],
        lambda: fill(worker, [12]),
        lambda: fill(store, [12]),
        store.written,
    ):
        with pytest.raises(TokenStoreError, match=r"replaced while it was in use \(id"):
            use()
    assert holds(store, names[:10])
    assert remade is None or holds(TokenStore.open(tmp_path / "a"), names)


def zero_the_second_half(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))


def swap_with_another_store(file: Path) -> None:
    other = fill(make(file.parents[2] / "other", names_of(30)[::-1]))
    shutil.copyfile(part_of(other), file)


DAMAGES = [zero_the_second_half, swap_with_another_store, lambda file: os.truncate(file, 200)]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "use",
    [
        lambda store, path: store.verify(),
        lambda store, path: fill(store, [3]),
        lambda store, path: merge_stores(path / "merged", [store]),
        lambda store, path: list(store.chunks()),
    ],
    ids=["verify", "write", "merge", "chunks"],
)
def test_damaged_tokens_are_found_and_never_get_a_fresh_digest(tmp_path, damage, use):
    store = fill(make(tmp_path / "a", names_of(30)))
    damage(part_of(store))
    before = part_of(store).read_bytes()
    with pytest.raises(TokenStoreError, match=r"is damaged .*restore it"):
        use(TokenStore.open(tmp_path / "a"), tmp_path)
    assert part_of(store).read_bytes() == before
    assert not (tmp_path / "merged").exists()


def test_a_part_of_other_images_is_not_read(tmp_path):
    store = fill(make(tmp_path / "a", names_of(30)))
    swap_with_another_store(part_of(store))
    with pytest.raises(TokenStoreError, match="another image"):
        store[store.names[3]]


def test_changed_names_are_found(tmp_path):
    store = fill(make(tmp_path / "a", names_of(30)))
    store.verify()
    (file,) = store.path.glob("names-*")
    file.write_bytes(file.read_bytes().replace(b"train/3", b"train/4", 1))
    with pytest.raises(TokenStoreError, match=r"names.* has changed"):
        store.verify()


def test_an_extended_store_keeps_its_rows_and_an_open_reader_its_images(tmp_path):
    names = names_of(40)
    old = fill(make(tmp_path / "a", names[:30]))
    extended = extend_store(tmp_path / "a", names[30:])
    assert (extended.id, list(extended.names)) == (old.id, names)
    assert extended.missing().tolist() == list(range(30, 40))
    with pytest.raises(MissingTokensError, match="yet"):
        extended[names[35]]
    fill(extended)
    old.write([0], [grid_of(names[0])])  # rows that the writer does not know stay
    assert holds(TokenStore.open(tmp_path / "a"), names)
    assert (len(old), holds(old, names[:30]), names[35] in old) == (30, True, False)
    assert not old.missing().size


def test_extensions_at_the_same_moment_all_count(tmp_path):
    make(tmp_path / "a", ["a"])
    writers = [FORK.Process(target=extend_store, args=(tmp_path / "a", [name])) for name in "bcdefg"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(TokenStore.open(tmp_path / "a").names) == list("abcdefg")


def test_extensions_at_the_same_moment_give_no_image_anothers_tokens(tmp_path):
    """The later one counts, and the row that the other one's image had is refused."""
    manifest = fill(make(tmp_path / "a", ["a"])).path / "manifest.json"
    before = manifest.read_text()
    fill(extend_store(tmp_path / "a", ["b"]))
    manifest.write_text(before)  # as the other process has read it
    extended = extend_store(tmp_path / "a", ["x"])
    for use in (lambda: extended["x"], lambda: fill(extended, [1]), extended.verify):
        with pytest.raises(TokenStoreError, match=r"other image"):
            use()


def test_merged_stores_equal_one_made_at_once(tmp_path):
    """Also of one whose names are not in order, because it was extended."""
    names = sorted(names_of(PART_ROWS + 60))
    whole = make(tmp_path / "whole", names)
    make(tmp_path / "even", names[200::2])
    parts = [extend_store(tmp_path / "even", names[:200:2]), make(tmp_path / "odd", names[1::2])]
    for store, broken in ((whole, 11), (parts[1], 5)):
        store.write([], np.empty((0, *GRID), int), {broken: "truncated"})
        fill(store, [row for row in store.missing() if row < len(store) - 1])
    fill(parts[0])
    fill(whole, [len(names) - 2])
    with pytest.raises(TokenStoreError, match=r"do not fit together \(data_root: data, now here\)"):
        merge_stores(tmp_path / "merged", [*parts, make(tmp_path / "other", ["a"], data_root="here")])
    merged = merge_stores(tmp_path / "merged", parts)
    assert merged.skipped == whole.skipped == {names[11]: "truncated"}
    assert merged.missing().tolist() == whole.missing().tolist()
    for number in range(2):
        assert part_of(merged, number).read_bytes() == part_of(whole, number).read_bytes()


def test_workers_read_a_store_that_was_used_before_the_fork_or_pickled(tmp_path):
    names = names_of(400)
    store = fill(make(tmp_path / "a", names))
    assert holds(store, names[:3])
    with FORK.Pool(2) as pool:
        assert pool.starmap(holds, [(store, names[:200]), (store, names[200:])]) == [True, True]
    assert len(pickle.dumps(store)) < 2000


def test_a_file_system_that_gives_a_part_of_what_is_asked_for_is_asked_again(tmp_path, monkeypatch):
    names = names_of(40)
    store = fill(make(tmp_path / "a", names))
    preadv = os.preadv

    def give_little(file: int, arrays: list, at: int) -> int:
        return preadv(file, [memoryview(arrays[0]).cast("B")[:7]], at)

    monkeypatch.setattr(os, "preadv", give_little)
    assert holds(store, names)


def resident_kib() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line)
    return int(line.split()[1])


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> TokenStore:
    """ImageNet's number of names, the first two parts with tokens."""
    names = [f"train/n{index % 1000:08d}/n{index % 1000:08d}_{index}.JPEG" for index in range(1_281_167)]
    store = TokenStore.create(tmp_path_factory.mktemp("large") / "a", names, 14, 8192, DIGEST)
    store.write(range(2 * PART_ROWS), np.ones((2 * PART_ROWS, 14, 14), np.uint16))
    return store


def test_a_store_of_imagenets_size_opens_at_once_and_costs_no_memory_per_name(large):
    results = FORK.SimpleQueue()

    def measure() -> None:
        before, start = resident_kib(), time.process_time()  # of a busy machine, this process's share
        store = TokenStore.open(large.path)
        store["train/n00000005/n00000005_5.JPEG"]
        opened = time.process_time() - start
        for index in np.random.default_rng(0).integers(0, 2 * PART_ROWS, 5000).tolist():
            store[f"train/n{index % 1000:08d}/n{index % 1000:08d}_{index}.JPEG"]
        by_name = 5000 / (time.process_time() - start)
        kib = resident_kib() - before
        rows = np.random.default_rng(0).integers(0, 2 * PART_ROWS, 20_000)
        start = time.process_time()
        store.grids(rows)
        by_row = len(rows) / (time.process_time() - start)
        results.put((opened, kib, by_name, by_row))

    process = FORK.Process(target=measure)
    process.start()
    opened, kib, by_name, by_row = results.get()
    process.join()
    assert opened < 0.1
    assert kib < 10 * 1024
    assert by_name > 10_000
    assert by_row > 50_000  # 219,000 on an idle machine


def test_merging_looks_the_names_of_a_store_up_once(tmp_path, monkeypatch):
    """And not part by part, each time among all names: a million took minutes."""
    store = make(tmp_path / "a", names_of(2500))
    store.write(range(2500), np.zeros((2500, *store.grid), int))
    calls, find_all = [], StoredNames.find_all
    monkeypatch.setattr(StoredNames, "find_all", lambda *those: calls.append(1) or find_all(*those))
    merged = merge_stores(tmp_path / "merged", [store])
    assert (merged.missing().size, len(calls)) == (0, 2)  # of its images, and of the skipped ones
