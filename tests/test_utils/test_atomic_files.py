"""Folders that appear in one step, and what is seen of them over NFS."""

import errno
import os
import time

import pytest

from mapet_mm.utils.atomic_files import new_folder, wait_until_seen


@pytest.mark.parametrize(
    ("number", "raised"), [(errno.EEXIST, FileExistsError), (errno.EACCES, PermissionError)]
)
def test_a_folder_that_cannot_appear_says_why_and_leaves_nothing(number, raised, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(raised), new_folder(tmp_path / "store"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["gone", "gone/deeper"])
def test_a_folder_that_no_listing_shows_is_not_waited_for(name, tmp_path):
    start = time.monotonic()
    wait_until_seen(tmp_path / name)
    assert time.monotonic() - start < 0.1
