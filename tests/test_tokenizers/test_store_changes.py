"""Sealing, extending and merging token stores, also while others read, write and do the same."""

import contextlib
import errno
import multiprocessing
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from mapet_mm.tokenizers import MissingTokensError, TokenStore, TokenStoreError, extend_store, merge_stores
from mapet_mm.tokenizers.store import grids as store_grids
from mapet_mm.tokenizers.store import manifest as store_manifest
from mapet_mm.tokenizers.store.manifest import read_manifest
from mapet_mm.tokenizers.store.token_store import write_names

GRID = (2, 3)


def make(path, names, data_root="data", tokenizer="t" * 64, written=None, **options) -> TokenStore:
    store = TokenStore.create(path, names, GRID, 1000, tokenizer, data_root, **options)
    for row in range(len(names)) if written is None else written:
        store.write([row], [grid_of(names[row])])
    return store


def grid_of(name: str) -> np.ndarray:
    return np.random.default_rng(list(name.encode())).integers(1000, size=GRID).astype(np.uint16)


def fill(store: TokenStore) -> None:
    rows = store.missing()
    store.write(rows, np.array([grid_of(store.names[row]) for row in rows.tolist()]))


def files_of(path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def assert_holds(store: TokenStore, names: list[str]) -> None:
    assert all((store[name] == grid_of(name)).all() for name in names)


def test_a_sealed_store_keeps_ids_and_names_only(tmp_path):
    names = [f"n{index:03d}" for index in range(300)]
    store = make(tmp_path / "a", names, written=[])
    store.write(range(300), np.array([grid_of(name) for name in names]))
    assert not store.sealed
    store.seal()
    sizes = {name: len(content) for name, content in files_of(tmp_path / "a").items()}
    assert set(sizes) == {
        "generation-0001/manifest.json",
        "generation-0001/names.safetensors",
        "generation-0002/manifest.json",
        "generation-0002/grids.safetensors",
    }
    assert 0 < sizes["generation-0002/grids.safetensors"] - 300 * 6 * 2 < 200
    assert 0 < sizes["generation-0001/names.safetensors"] - 300 * 5 < 500
    store = TokenStore.open(tmp_path / "a")
    assert store.sealed
    assert (store.missing().size, store.written().all(), len(store)) == (0, True, 300)
    assert_holds(store, names)


def test_an_incomplete_store_is_not_sealed(tmp_path):
    store = make(tmp_path / "a", ["a", "b"], written=[0])
    with pytest.raises(TokenStoreError, match="misses the tokens of 1 images"):
        store.seal()


def test_a_reader_goes_on_when_the_store_is_sealed(tmp_path):
    make(tmp_path / "a", ["a", "b"])
    used, unused = TokenStore.open(tmp_path / "a"), TokenStore.open(tmp_path / "a")
    assert_holds(used, ["a"])
    TokenStore.open(tmp_path / "a").seal()
    assert not list((tmp_path / "a" / "blocks").iterdir())
    for store in (used, unused):
        assert_holds(store, ["a", "b"])
        assert store.missing().size == 0


def test_a_reader_sees_what_is_written_after_it_opened_the_store(tmp_path):
    writer = make(tmp_path / "a", ["a", "b"], written=[])
    reader = TokenStore.open(tmp_path / "a")
    with pytest.raises(MissingTokensError, match="no tokens for image `b` yet"):
        reader["b"]
    writer.write([1], [grid_of("b")])
    assert_holds(reader, ["b"])


def test_writing_to_a_sealed_store_counts_at_once_and_is_sealed_again(tmp_path):
    store = make(tmp_path / "a", ["a", "b"])
    store.seal()
    store.write([1], np.full((1, *GRID), 7))
    assert not TokenStore.open(tmp_path / "a").sealed
    assert (TokenStore.open(tmp_path / "a")["b"] == 7).all()
    store.seal()
    again = TokenStore.open(tmp_path / "a")
    again.verify_checksums()
    assert (again["b"] == 7).all()
    assert_holds(again, ["a"])


def test_the_later_of_two_writes_of_a_row_counts(tmp_path):
    store = make(tmp_path / "a", ["a", "b"])
    store.write([0, 1], np.full((2, *GRID), 5))
    store.write([1], np.full((1, *GRID), 6))
    for sealed in (False, True):
        if sealed:
            store.seal()
        again = TokenStore.open(tmp_path / "a")
        assert ((again["a"] == 5).all(), (again["b"] == 6).all()) == (True, True)


@pytest.mark.parametrize("moment", ["before the manifest", "before the first block is removed"])
def test_a_killed_seal_loses_nothing_and_the_next_one_ends_it(tmp_path, monkeypatch, moment):
    make(tmp_path / "a", ["a", "b", "c"])
    shutil.copytree(tmp_path / "a", tmp_path / "undisturbed")
    TokenStore.open(tmp_path / "undisturbed").seal()

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if moment == "before the manifest":
            patch.setattr(store_manifest, "replace_json", killed)
        else:
            patch.setattr(store_grids.Grids, "drop_blocks", killed)
        with pytest.raises(KeyboardInterrupt):
            TokenStore.open(tmp_path / "a").seal()
    assert_holds(TokenStore.open(tmp_path / "a"), ["a", "b", "c"])
    TokenStore.open(tmp_path / "a").seal()
    mine = {name: text for name, text in files_of(tmp_path / "a").items() if "partial" not in name}
    assert mine == files_of(tmp_path / "undisturbed")


@pytest.mark.parametrize("name", ["generation-0002/grids.safetensors", "generation-0001/names.safetensors"])
def test_a_changed_file_is_named(tmp_path, name):
    store = make(tmp_path / "a", ["a", "b"])
    store.seal()
    store.verify_checksums()
    content = bytearray((tmp_path / "a" / name).read_bytes())
    content[-2] ^= 1
    (tmp_path / "a" / name).write_bytes(content)
    with pytest.raises(TokenStoreError, match=rf"{name}` has changed since it was written"):
        TokenStore.open(tmp_path / "a").verify_checksums()


def test_a_store_without_checksums_says_so(tmp_path):
    with pytest.raises(TokenStoreError, match="has no checksums yet"):
        make(tmp_path / "a", ["a"], written=[]).verify_checksums()


@pytest.mark.parametrize("names", [["b", "d", "f"], ["f", "b", "d"]], ids=["sorted", "unsorted"])
def test_an_extended_store_keeps_its_rows_and_misses_the_new(tmp_path, names):
    store = make(tmp_path / "a", names, written=[0, 2])
    extended = extend_store(tmp_path / "a", ["e", "a"])
    assert list(extended.names) == [*names, "e", "a"]
    assert [extended.names[row] for row in (0, 3, -1)] == [names[0], "e", "a"]
    assert [extended.row(name) for name in extended.names] == list(range(5))
    assert_holds(extended, [names[0], names[2]])
    assert {extended.names[row] for row in extended.missing()} == {names[1], "a", "e"}
    fill(extended)
    extended.seal()
    assert_holds(TokenStore.open(tmp_path / "a"), [*names, "a", "e"])
    again = extend_store(tmp_path / "a", ["z"])
    assert_holds(again, [*names, "a", "e"])
    assert [again.names[row] for row in again.missing()] == ["z"]
    assert not again.sealed
    assert len(store) == 3


def test_a_store_extended_while_it_is_open_gives_each_image_its_own_tokens(tmp_path):
    """Opened, used, pickled and forked before two extensions and a seal; 10,000 look-ups in random order."""
    names = [f"{index:04d}" for index in range(400)]
    make(tmp_path / "a", names[:200:2], written=[])
    fill(TokenStore.open(tmp_path / "a"))
    reader, unused = TokenStore.open(tmp_path / "a"), TokenStore.open(tmp_path / "a")
    draw = random.Random(0)
    old = names[:200:2]
    steps = [
        lambda: extend_store(tmp_path / "a", names[1:200:2]),
        lambda: fill(TokenStore.open(tmp_path / "a")),
        lambda: TokenStore.open(tmp_path / "a").seal(),
        lambda: fill(extend_store(tmp_path / "a", names[200:])),
        lambda: TokenStore.open(tmp_path / "a").seal(),
    ]
    for step in steps:
        assert_holds(reader, draw.choices(old, k=2000))
        step()
    for store in (reader, unused):
        assert_holds(store, draw.choices(old, k=200))
        assert (len(store), list(store.names)) == (100, old)
        assert names[1] not in store
    newest = TokenStore.open(tmp_path / "a")
    assert_holds(newest, names)
    newest.verify_checksums()


def test_a_seal_of_an_older_reader_keeps_what_was_added_since(tmp_path):
    old = make(tmp_path / "a", ["a", "b"])
    extended = extend_store(tmp_path / "a", ["c", "d"])
    extended.write([2], [grid_of("c")])
    old.seal()
    assert not old.sealed  # whoever writes the last image seals
    TokenStore.open(tmp_path / "a").write([0, 3], [grid_of("a"), grid_of("d")])
    old.seal()
    newest = TokenStore.open(tmp_path / "a")
    assert (old.sealed, newest.sealed, list(newest.names)) == (True, True, ["a", "b", "c", "d"])
    assert_holds(newest, list("abcd"))
    newest.verify_checksums()


def test_an_extension_writes_only_its_own_grids(tmp_path):
    make(tmp_path / "a", ["a", "b"]).seal()
    fill(extend_store(tmp_path / "a", ["c"]))
    TokenStore.open(tmp_path / "a").write([1], [grid_of("b")])  # again, by a straggler
    TokenStore.open(tmp_path / "a").seal()
    grids = [path.stat().st_size for path in sorted((tmp_path / "a").glob("*/grids.safetensors"))]
    assert [size // 12 * 12 - min(grids) // 12 * 12 for size in grids] == [12, 0]
    assert_holds(TokenStore.open(tmp_path / "a"), ["a", "b", "c"])


@pytest.mark.parametrize("other", [dict(names=["x", "y"]), dict(tokenizer="u" * 64)])
def test_blocks_of_another_store_that_was_here_do_not_count(tmp_path, other):
    """A process that still writes when a store is removed and made anew."""
    straggler = make(tmp_path / "a", ["a", "b"], written=[])
    shutil.rmtree(tmp_path / "a")
    store = make(tmp_path / "a", **{"names": ["a", "b"], "written": [0], **other})
    straggler.write([0, 1], np.full((2, *GRID), 7))
    for reader in (store, TokenStore.open(tmp_path / "a")):
        assert reader.missing().tolist() == [1]
        assert_holds(reader, [reader.names[0]])
    fill(store)
    store.seal()
    assert_holds(TokenStore.open(tmp_path / "a"), list(store.names))


def test_an_extension_killed_before_its_end_changes_nothing(tmp_path, monkeypatch):
    make(tmp_path / "a", ["a", "c"]).seal()

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store_manifest, "replace_json", killed)
        with pytest.raises(KeyboardInterrupt):
            extend_store(tmp_path / "a", ["b"])
    store = TokenStore.open(tmp_path / "a")
    assert list(store.names) == ["a", "c"]
    store.verify_checksums()
    assert list(extend_store(tmp_path / "a", ["b"]).names) == ["a", "c", "b"]


def test_names_that_are_there_are_not_added(tmp_path):
    make(tmp_path / "a", ["a", "c"])
    with pytest.raises(TokenStoreError, match="has image 'c' already"):
        extend_store(tmp_path / "a", ["b", "c"])
    with pytest.raises(TokenStoreError, match="'b' is given twice"):
        extend_store(tmp_path / "a", ["b", "b"])
    with pytest.raises(TokenStoreError, match="no image names given"):
        extend_store(tmp_path / "a", [])
    assert list(TokenStore.open(tmp_path / "a").names) == ["a", "c"]


def _do_all(path: str, number: int) -> None:
    names = [f"{number}-{index}" for index in range(5)]
    store = extend_store(path, names)
    rows = [store.row(name) for name in names]
    store.write(rows, np.array([grid_of(name) for name in names]))
    with contextlib.suppress(TokenStoreError):  # it misses the tokens of a process that is not as far
        TokenStore.open(path).seal()


def test_processes_that_extend_write_and_seal_at_once_lose_nothing(tmp_path):
    make(tmp_path / "a", ["first"])
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_do_all, args=(tmp_path / "a", number)) for number in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
    store = TokenStore.open(tmp_path / "a")
    assert sorted(store.names) == sorted(
        ["first", *(f"{number}-{index}" for number in range(6) for index in range(5))]
    )
    store.seal()
    assert_holds(store, list(store.names))
    store.verify_checksums()


def _create(path: str, results) -> None:
    try:
        TokenStore.create(path, ["a", "b"], GRID, 1000, "t" * 64)
        results.put("made")
    except TokenStoreError as error:
        results.put(str(error))


def test_of_processes_that_create_a_store_at_once_one_makes_it(tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [context.Process(target=_create, args=(tmp_path / "a", results)) for _ in range(4)]
    for process in processes:
        process.start()
    said = sorted(results.get() for _ in processes)
    assert said[0] == "made"
    assert all("exists with the same names, grid and tokenizer: continue it" in one for one in said[1:])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_complete_store_is_read_and_sealed_without_writing(tmp_path, monkeypatch):
    """As on a read-only mount."""
    make(tmp_path / "a", ["a", "b"]).seal()

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    for function in ("replace", "rename", "mkdir", "unlink", "fsync"):
        monkeypatch.setattr(os, function, refuse)
    store = TokenStore.open(tmp_path / "a")
    store.seal()
    store.verify_checksums()
    assert_holds(store, ["a", "b"])


def test_a_skipped_image_is_not_missing_and_says_why(tmp_path):
    store = make(tmp_path / "a", ["a", "b", "c"], written=[0])
    store.write([2], [grid_of("c")], skipped={1: "no image"})
    for sealed in (False, True):
        if sealed:
            store.seal()
        store = TokenStore.open(tmp_path / "a")
        assert store.skipped == {"b": "no image"}
        assert store.missing().size == 0
        assert store.missing(with_skipped=True).tolist() == [1]
        assert store.written().tolist() == [True, False, True]
        assert_holds(store, ["a", "c"])
        with pytest.raises(MissingTokensError, match=r"`b`, which was skipped \(no image\): leave it out"):
            store["b"]
    store.write([1], [grid_of("b")])  # repaired
    assert store.skipped == {}
    store.seal()
    assert_holds(TokenStore.open(tmp_path / "a"), ["a", "b", "c"])


def test_an_image_repaired_before_sealing_is_no_longer_skipped(tmp_path):
    store = make(tmp_path / "a", ["a", "b"], written=[0])
    store.write([], np.zeros((0, *GRID), int), skipped={1: "no image"})
    assert store.skipped == {"b": "no image"}
    store.write([1], [grid_of("b")])
    for reader in (store, TokenStore.open(tmp_path / "a")):
        assert reader.skipped == {}
        assert reader.missing(with_skipped=True).size == 0
        assert_holds(reader, ["a", "b"])


def test_an_image_skipped_after_sealing_is_skipped_in_the_next_seal(tmp_path):
    store = make(tmp_path / "a", ["a", "b"])
    store.seal()
    store.write([], np.zeros((0, *GRID), int), skipped={1: "no image"})
    store.seal()
    assert TokenStore.open(tmp_path / "a").skipped == {"b": "no image"}


def test_files_held_open_are_bounded_however_many_blocks_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr(store_grids, "HANDLES", 2)
    names = [f"n{index}" for index in range(6)]
    make(tmp_path / "a", names)
    reader = TokenStore.open(tmp_path / "a")
    for _ in range(2):
        assert_holds(reader, names)
    held = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert sum(str(tmp_path / "a" / "blocks") in file for file in held) <= 2


def test_a_reader_keeps_the_other_blocks_when_one_is_removed(tmp_path):
    """As the message of a damaged block advises."""
    make(tmp_path / "a", ["a", "b"])
    reader = TokenStore.open(tmp_path / "a")
    assert reader.written().tolist() == [True, True]
    os.remove(min((tmp_path / "a" / "blocks").iterdir()))
    assert reader.written().tolist() == [False, True]
    assert_holds(reader, ["b"])


@pytest.fixture
def _over_nfs(monkeypatch):
    """Reads fail of a file that is open here and that another machine has removed."""

    def checked(read):
        def call(descriptor, *args):
            if os.fstat(descriptor).st_nlink == 0:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return read(descriptor, *args)

        return call

    monkeypatch.setattr(os, "preadv", checked(os.preadv))
    monkeypatch.setattr(os, "pread", checked(os.pread))


@pytest.mark.usefixtures("_over_nfs")
def test_a_reader_over_nfs_goes_on_when_another_machine_seals_the_store(tmp_path):
    names = [f"n{index}" for index in range(6)]
    reader = make(tmp_path / "a", names)
    assert_holds(reader, names)
    TokenStore.open(tmp_path / "a").seal()
    assert_holds(reader, names)


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = make(tmp_path / "a", ["x", "y"], written=[0])
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*a/blocks/.*\.safetensors'"):
        store.write([1], [grid_of("y")])
    assert store.missing().tolist() == [1]
    assert not list(tmp_path.rglob("*.partial"))


def test_of_two_that_make_a_generation_the_second_notices_though_it_does_not_see_the_first(
    tmp_path, monkeypatch
):
    """Over NFS, that there is no such folder is remembered for seconds."""
    make(tmp_path / "a", ["x"])
    manifest = read_manifest(tmp_path / "a")
    write_names(tmp_path / "a", manifest, ["x", "y"])
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with pytest.raises(FileExistsError):
        write_names(tmp_path / "a", manifest, ["x", "y"])


def test_a_generation_that_a_listing_shows_is_waited_for_until_it_is_seen(tmp_path, monkeypatch):
    """Over NFS, a look-up of it may say for seconds that it is not there, as it was before."""
    make(tmp_path / "a", ["x"])
    extend_store(tmp_path / "a", ["y"])
    looks, hidden = [], tmp_path / "a" / "generation-0002"
    exists, read_text = Path.exists, Path.read_text

    def unseen(path):
        looks.append(path)
        return looks.count(hidden) > 2 if path == hidden else exists(path)

    def read(path, *args, **kwargs):
        if path.parent == hidden and looks.count(hidden) < 3:
            raise FileNotFoundError(path)
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "exists", unseen)
    monkeypatch.setattr(Path, "read_text", read)
    assert list(TokenStore.open(tmp_path / "a").names) == ["x", "y"]


def test_chunks_are_all_stored_rows_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(store_grids, "CHUNK_ROWS", 3)
    names = [f"{index:02d}" for index in range(10)]
    make(tmp_path / "a", names[:7], written=[0, 2, 3, 6])
    fill(extend_store(tmp_path / "a", names[7:]))
    store = TokenStore.open(tmp_path / "a")
    store.write([1], [grid_of("01")])
    rows = np.concatenate([rows for rows, _ in store.chunks()])
    grids = np.concatenate([grids for _, grids in store.chunks()])
    assert rows.tolist() == list(range(10))
    assert all((grid == grid_of(name)).all() for grid, name in zip(grids, names, strict=True))
    assert max(len(rows) for rows, _ in store.chunks()) <= 3


def test_chunks_go_on_when_the_store_is_sealed_in_between(tmp_path, monkeypatch):
    monkeypatch.setattr(store_grids, "CHUNK_ROWS", 1)
    make(tmp_path / "a", ["a", "b", "c"])
    chunks = TokenStore.open(tmp_path / "a").chunks()
    found = [next(chunks)]
    TokenStore.open(tmp_path / "a").seal()
    found += chunks
    assert [rows.tolist() for rows, _ in found] == [[0], [1], [2]]
    assert all((grids[0] == grid_of(name)).all() for (_, grids), name in zip(found, "abc", strict=True))


def test_merged_stores_equal_one_made_at_once(tmp_path):
    names = [f"{index:02d}" for index in range(40)]
    make(tmp_path / "even", names[::2]).seal()
    make(tmp_path / "odd", names[1::2])
    make(tmp_path / "whole", names).seal()
    parts = [TokenStore.open(tmp_path / part) for part in ("even", "odd")]
    merge_stores(tmp_path / "merged", parts)
    assert files_of(tmp_path / "merged") == files_of(tmp_path / "whole")


def test_what_a_part_misses_the_merged_store_misses(tmp_path):
    parts = [make(tmp_path / "x", ["b", "a"], written=[0]), make(tmp_path / "y", ["c", "d"], written=[0])]
    parts[1].write([], np.empty((0, *GRID), int), skipped={1: "broken"})
    merged = merge_stores(tmp_path / "merged", parts)
    assert_holds(merged, ["b", "c"])
    assert merged.skipped == {"d": "broken"}
    with pytest.raises(MissingTokensError, match="no tokens for image `a` yet"):
        merged["a"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (dict(tokenizer="u" * 64), "have different tokenizer"),
        (dict(data_root="elsewhere"), r"have different data_root \(data, elsewhere\)"),
        (dict(preprocessing={"pipeline": []}), "have different preprocessing"),
        (dict(names=["b", "a"]), "'a' is given twice"),
    ],
)
def test_stores_that_do_not_fit_together_are_not_merged(tmp_path, other, message):
    parts = [make(tmp_path / "x", ["a"]), make(tmp_path / "y", **{"names": ["b"], **other})]
    with pytest.raises(TokenStoreError, match=message):
        merge_stores(tmp_path / "merged", parts)
    assert not (tmp_path / "merged").exists()


def test_a_merged_store_does_not_replace_another(tmp_path):
    part = make(tmp_path / "x", ["a"])
    with pytest.raises(TokenStoreError, match=r"x` exists: choose another path or remove it"):
        merge_stores(tmp_path / "x", [part])
    assert_holds(TokenStore.open(tmp_path / "x"), ["a"])
