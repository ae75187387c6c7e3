"""Sealing token stores and reading them, also while others write and seal."""

import errno
import os
import shutil

import numpy as np
import pytest
from filled_stores import GRID, assert_holds, files_of, fill, grid_of, make

from mapet_mm.structures import grids as store_grids
from mapet_mm.structures import manifest as store_manifest
from mapet_mm.tokenizers import MissingTokensError, TokenStore, TokenStoreError, extend_store


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
