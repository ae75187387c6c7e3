"""Files and folders appear in one step, or nothing is left."""

import errno
import os
import stat

import pytest

from mapet_mm.utils.atomic_files import full_disk_named, new_file, new_folder, replace_file


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


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_is_named(call, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    replace_file(tmp_path / "file", b"old")
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match=r"No space left.*file"):
        replace_file(tmp_path / "file", b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP])
@pytest.mark.parametrize("only_folders", [True, False])
def test_files_are_written_where_the_file_system_cannot_flush(number, only_folders, tmp_path, monkeypatch):
    flush = os.fsync

    def refuse(descriptor: int) -> None:
        if only_folders and not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return flush(descriptor)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    replace_file(tmp_path / "file", b"new")
    with new_folder(tmp_path / "folder") as folder:
        (folder / "inside").write_bytes(b"new")
    assert [path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()] == [b"new"] * 2
    assert len(list(tmp_path.iterdir())) == 2


def test_an_error_of_another_kind_keeps_its_words():
    with pytest.raises(OSError, match=r"^\[Errno 5\] broken$"), full_disk_named("work_dir"):
        raise OSError(errno.EIO, "broken")


def test_a_file_that_cannot_be_written_is_named_not_its_partial_one(tmp_path):
    with pytest.raises(OSError, match=r"'[^']*/gone/list\.txt'$"):
        replace_file(tmp_path / "gone" / "list.txt", b"")
    with pytest.raises(OSError, match=r"'[^']*/other\.txt'$"), new_file(tmp_path / "list.txt"):
        (tmp_path / "other.txt").read_text()
