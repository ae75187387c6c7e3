"""Creating and extending token stores, also by several processes at once."""

import contextlib
import multiprocessing
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from filled_stores import GRID, assert_holds, fill, grid_of, make

from mapet_mm.structures import manifest as store_manifest
from mapet_mm.structures.store.manifest import read_manifest
from mapet_mm.structures import write_names
from mapet_mm.tokenizers import TokenStore, TokenStoreError, extend_store


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
