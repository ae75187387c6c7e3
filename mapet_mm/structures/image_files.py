"""Files of images: the file that an image's name leads to, and by whose content images are known again."""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from heapq import nsmallest
from pathlib import Path

import cv2
import numpy as np

from mapet_mm.utils.errors import UserError

CORNER = re.compile(r"\d+,\d+")  # of a tile, behind a file's name and `#`
SAMPLED_FILES = 64
LARGEST_READ = 2**24  # bytes
SAMPLED_TAR_FILES = 8  # whose members are listed from the start


def file_of(path: str) -> str:
    """The file that the path or name of an image leads to: `a.png` of the tile `a.png#0,224`."""
    file, mark, corner = path.rpartition("#")
    return file if mark and CORNER.fullmatch(corner) else path


def tar_of(path: str | os.PathLike) -> Path | None:
    """The file that a path of an image leads into, such as `0.tar` of `0.tar/cats/1.jpg`."""
    return _file_above(os.path.dirname(path))


@lru_cache(maxsize=1024)
def _file_above(folder: str) -> Path | None:
    path = Path(folder)
    return next((one for one in (path, *path.parents) if one.is_file()), None)


def file_digests(root: str | os.PathLike | None, names: Iterable[str]) -> dict[str, str]:
    """SHA-256, by name, of 64 of the images below a folder: whether others have the same names elsewhere.

    Of tiles it is that of their files. Which ones, the names decide. An image that cannot be decoded has no
    digest, so that it may be repaired.
    All are left out that are not in files or tar files of this machine.
    """
    if root is None:
        return {}
    files = dict.fromkeys(map(file_of, names))
    chosen = nsmallest(SAMPLED_FILES, files, key=lambda name: (_checksum(name), name))
    contents = _contents(Path(root), chosen)
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents if _is_image(content)}


def require_same_files(
    recorded: Mapping[str, str] | None,
    root: str | os.PathLike,
    whose: str,
    remedy: str,
    error: type[UserError] = UserError,
) -> bool:
    """Whether the images below a folder are those of recorded digests, wherever the folder is now.

    Args:
        recorded: of `file_digests`; None or empty if there are none.
        root: the folder.
        whose: names what was made of the images, for the message.
        remedy: what the user can do, for the message.
        error: the kind of error to raise.

    Returns:
        False if nothing can be said: none is recorded, or none is there.

    Raises:
        UserError: one is another image.
    """
    num_found = 0
    for name, content in _contents(Path(root), recorded or {}):
        num_found += 1
        if hashlib.sha256(content).hexdigest() != recorded[name]:
            raise error(f"{whose} was made of another image `{name}` than {Path(root, name)}: {remedy}")
    return num_found > 0


def _checksum(name: str) -> int:
    return zlib.crc32(name.encode("utf-8", "surrogateescape"))


def _contents(root: Path, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Names of images and what their files hold, if they can be read; of tar files, of the first few."""
    in_tar_files: dict[Path, dict[str, str]] = {}
    for name in names:
        path = root / name
        shard = tar_of(path)
        if shard is not None:
            in_tar_files.setdefault(shard, {})[os.path.relpath(path, shard)] = name
        elif os.access(path, os.R_OK) and path.is_file():
            with open(path, "rb") as file:
                yield name, file.read(LARGEST_READ)
    for shard in sorted(in_tar_files)[:SAMPLED_TAR_FILES]:
        yield from _members(shard, in_tar_files[shard])


def _members(shard: Path, names: dict[str, str]) -> list[tuple[str, bytes]]:
    """The first member of each name in a tar file, with what it is called outside; none of another file."""
    wanted = dict(names)
    found = []
    with suppress(tarfile.TarError), tarfile.open(shard, "r:") as file:
        for member in file:
            name = wanted.pop(os.path.normpath(member.name), None)
            if name is not None and member.isfile():
                found.append((name, file.extractfile(member).read(LARGEST_READ)))
            if not wanted:
                break
    return found


def _is_image(content: bytes) -> bool:
    """Whether a file's content can be decoded; of a large one, it is not all here."""
    if len(content) in (0, LARGEST_READ):
        return len(content) > 0
    try:
        return cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_GRAYSCALE) is not None
    except cv2.error:
        return False
