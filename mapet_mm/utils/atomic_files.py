"""Write files and folders that appear complete or not at all, beside other writers."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mapet_mm.utils.errors import FULL_DISK

STALE_SECONDS = 3600  # after which nobody writes to a partial file any more
# What file systems answer that cannot flush a folder (SMB shares, sshfs, shared folders) or, some, a file.
CANNOT_FLUSH = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in one step; it is on disk when this returns. A killed run leaves the old or the new file.

    Its folder must exist.
    """
    with new_file(path) as partial:
        partial.write_bytes(content)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A file to write, which takes its place at `path` in one step when the block ends."""
    partial = partial_path(path)
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
        sync(path.parent)
    except OSError as error:
        if error.filename in (None, os.fspath(partial)):  # a full disk's error names no file
            error.filename = os.fspath(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def full_disk_named(path: str | os.PathLike) -> Iterator[None]:
    """Let the error of a full disk, or of a full quota, name the path that is written to in this context."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL_DISK and not error.filename:
            error.filename = os.fspath(path)
        raise


def replace_json(path: Path, content: Any) -> None:
    """Write a value as indented JSON in one step."""
    replace_file(path, (json.dumps(content, indent=1) + "\n").encode())


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which appears at `path` complete when the block ends, unless something is there.

    Raises:
        FileExistsError: something is at `path` by then; the filled folder is removed.
    """
    partial = partial_path(path)
    partial.mkdir(parents=True)
    try:
        yield partial
        sync(partial)
        try:
            os.rename(partial, path)  # fails if the target is a non-empty folder, on every file system
        except OSError as error:
            # Over NFS, a machine that looked earlier may believe for a while that nothing is there.
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST) or path.exists():
                raise FileExistsError(f"`{path}` exists") from None
            raise
        sync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def partial_path(path: Path) -> Path:
    """A name beside `path` that is unique across processes and machines."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk, where its file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_FLUSH:
            raise
    finally:
        os.close(descriptor)


def remove_stale(folder: Path) -> None:
    """Remove what killed processes have left in a folder: partial files that nobody has written to lately."""
    for partial in folder.glob(".*.partial"):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if time.time() - partial.stat().st_mtime > STALE_SECONDS:
                partial.unlink()
