"""Files of equal content, which must not lie on both sides of a split."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from mapet_mm.datasets.reading import in_threads
from mapet_mm.structures.image_files import file_of
from mapet_mm.utils.identity import digest_of_file

PART = 4096  # bytes in the middle of a file: of photographs, the beginnings are often equal


def first_copies(paths: Sequence[str]) -> list[int]:
    """For each image, the index of the first one with the same content: its own, if there is none before.

    A tile is a copy of the same tile of an equal file. Files that cannot be read, and empty ones, have no
    copies.
    """
    files = list(dict.fromkeys(map(file_of, paths)))
    original = _first_files(files)
    seen: dict[str, int] = {}
    first = []
    for index, path in enumerate(paths):
        file = file_of(path)
        corner = path[len(file) :]
        first.append(seen.setdefault(original[file] + corner, index))
    return first


def _first_files(files: Sequence[str]) -> dict[str, str]:
    """For each file, the first one with the same content.

    Of files of one size a few bytes are compared, and of those that agree all.
    """
    groups = [list(files)]
    for key_of in (_size, _middle, digest_of_file):
        compared = [file for group in groups for file in group]
        keys = in_threads(partial(_or_none, key_of), compared, "looking for copies")
        alike = []
        for group in groups:
            by_key = defaultdict(list)
            for file in group:
                by_key[next(keys)].append(file)
            alike += [found for key, found in by_key.items() if key and len(found) > 1]
        groups = alike
    first = dict(zip(files, files, strict=True))
    for group in groups:
        first.update(dict.fromkeys(group, group[0]))
    return first


def _or_none(key_of: Callable[[str], object], file: str) -> object:
    try:
        return key_of(file)
    except OSError:
        return None


def _size(file: str) -> int:
    return os.stat(file).st_size


def _middle(path: str) -> bytes:
    with open(path, "rb") as file:
        file.seek(os.fstat(file.fileno()).st_size // 2)
        return file.read(PART)
