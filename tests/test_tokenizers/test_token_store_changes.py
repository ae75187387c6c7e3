"""Sealing, extending and merging token stores."""

import numpy as np
import pytest

from mapet_mm.tokenizers import token_files
from mapet_mm.tokenizers.token_store import MissingTokensError, TokenStore, TokenStoreError
from mapet_mm.tokenizers.token_store_changes import extend_store, merge_stores

GRID = (2, 3)


def make(path, names, data_root="data", tokenizer="t" * 64, written=None) -> TokenStore:
    store = TokenStore.create(path, names, GRID, 1000, tokenizer, data_root)
    for row in range(len(names)) if written is None else written:
        store.write([row], [grid_of(names[row])])
    return store


def grid_of(name: str) -> np.ndarray:
    return np.random.default_rng(list(name.encode())).integers(1000, size=GRID).astype(np.uint16)


def files_of(path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def assert_holds(store: TokenStore, names: list[str]) -> None:
    assert all((store[name] == grid_of(name)).all() for name in names)


def test_a_sealed_store_keeps_ids_and_names_only(tmp_path):
    names = [f"n{index:03d}" for index in range(300)]
    store = make(tmp_path / "a", names)
    assert not store.sealed
    store.seal()
    sizes = {name: len(content) for name, content in files_of(tmp_path / "a").items()}
    assert sizes.pop("grids.bin") == 300 * 6 * 2
    assert sizes.pop("names.txt") == 300 * 5
    assert sum(sizes.values()) < 700  # meta.json and three names
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
    for store in (used, unused):
        assert_holds(store, ["a", "b"])
        assert store.missing().size == 0


def test_writing_to_a_sealed_store_opens_it_again(tmp_path):
    store = make(tmp_path / "a", ["a", "b"])
    store.seal()
    store.write([1], np.full((1, *GRID), 7))
    assert not TokenStore.open(tmp_path / "a").sealed
    assert (TokenStore.open(tmp_path / "a")["b"] == 7).all()
    store.seal()
    TokenStore.open(tmp_path / "a").verify_checksums()


@pytest.mark.parametrize("name", ["grids.bin", "names.txt"])
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
def test_an_extended_store_keeps_its_tokens_and_misses_the_new(tmp_path, names):
    store = make(tmp_path / "a", names, written=[0, 2])
    extended = extend_store(tmp_path / "a", ["e", "a"])
    in_order = names == sorted(names)
    assert list(extended.names) == (sorted([*names, "e", "a"]) if in_order else [*names, "e", "a"])
    assert_holds(extended, [names[0], names[2]])
    missing = {extended.names[row] for row in extended.missing()}
    assert missing == {names[1], "a", "e"}
    for name in missing:
        extended.write([extended.row(name)], [grid_of(name)])
    extended.seal()
    assert_holds(TokenStore.open(tmp_path / "a"), [*names, "a", "e"])
    again = extend_store(tmp_path / "a", ["z"])
    assert_holds(again, [*names, "a", "e"])
    assert [again.names[row] for row in again.missing()] == ["z"]
    # One set of files is left, and who had the store open before the first extension still reads it.
    assert {name.split(".")[0] for name in files_of(tmp_path / "a")} >= {"grids", "names", "marks", "meta"}
    assert len([name for name in files_of(tmp_path / "a") if name.startswith("grids")]) == 1
    assert len(store) == 3


def test_an_extension_killed_before_its_end_changes_nothing(tmp_path, monkeypatch):
    make(tmp_path / "a", ["a", "c"]).seal()

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(token_files, "write_meta", killed)
        with pytest.raises(KeyboardInterrupt):
            extend_store(tmp_path / "a", ["b"])
    store = TokenStore.open(tmp_path / "a")
    assert list(store.names) == ["a", "c"]
    store.verify_checksums()
    assert list(extend_store(tmp_path / "a", ["b"]).names) == ["a", "b", "c"]


def test_names_that_are_there_are_not_added(tmp_path):
    make(tmp_path / "a", ["a", "c"])
    with pytest.raises(TokenStoreError, match="'c' is given twice"):
        extend_store(tmp_path / "a", ["b", "c"])
    assert list(TokenStore.open(tmp_path / "a").names) == ["a", "c"]


def test_merged_stores_equal_one_made_at_once(tmp_path):
    names = [f"{index:02d}" for index in range(40)]
    make(tmp_path / "even", names[::2]).seal()
    make(tmp_path / "odd", names[1::2])
    make(tmp_path / "whole", names).seal()
    parts = [TokenStore.open(tmp_path / part) for part in ("even", "odd")]
    merge_stores(tmp_path / "merged", parts)
    assert files_of(tmp_path / "merged") == files_of(tmp_path / "whole")


def test_what_a_part_misses_the_merged_store_misses(tmp_path):
    parts = [make(tmp_path / "x", ["b", "a"], written=[0]), make(tmp_path / "y", ["c"])]
    merged = merge_stores(tmp_path / "merged", parts)
    assert_holds(merged, ["b", "c"])
    with pytest.raises(MissingTokensError, match="no tokens for image `a` yet"):
        merged["a"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (dict(tokenizer="u" * 64), "have different tokenizer"),
        (dict(data_root="elsewhere"), r"have different data_root \(data, elsewhere\)"),
        (dict(names=["b", "a"]), "'a' is given twice"),
    ],
)
def test_stores_that_do_not_fit_together_are_not_merged(tmp_path, other, message):
    parts = [make(tmp_path / "x", ["a"]), make(tmp_path / "y", **{"names": ["b"], **other})]
    with pytest.raises(TokenStoreError, match=message):
        merge_stores(tmp_path / "merged", parts)
    assert not (tmp_path / "merged").exists()
