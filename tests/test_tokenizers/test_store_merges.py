"""Merging token stores."""

import numpy as np
import pytest
from filled_stores import GRID, assert_holds, files_of, make

from mapet_mm.tokenizers import MissingTokensError, TokenStore, TokenStoreError, merge_stores


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


def test_parts_of_images_in_different_folders_are_merged_under_the_folder_that_is_given(tmp_path):
    parts = [make(tmp_path / "x", ["a"], "/mnt/x"), make(tmp_path / "y", ["b"], "/mnt/y")]
    merged = merge_stores(tmp_path / "merged", parts, "data")
    assert_holds(merged, ["a", "b"])
    assert merged.data_root == "data"
    assert merge_stores(tmp_path / "same", parts[:1]).data_root == "/mnt/x"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (dict(tokenizer="u" * 64), r"have different tokenizer \(.*\): they cannot be merged$"),
        (dict(data_root="elsewhere"), r"have different data_root \(data, elsewhere\): give .* --data-root$"),
        (dict(preprocessing={"pipeline": []}), "have different preprocessing"),
        (
            dict(names=["b", "a"]),
            "/x` and `.*/y` both have image 'a': leave one of them out, or",
        ),
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
