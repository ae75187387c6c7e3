"""Files of equal content, which must not lie on both sides of a split."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from tqdm import tqdm

from mapet_mm.structures.image_files import file_of
from mapet_mm.utils.identity import digest_of_file

THREADS = 16  # that wait for a network's storage
AT_ONCE = 64  # files for a thread
PART = 4096  # bytes in the middle of a file: of photographs, the beginnings are often equal


def first_copies(paths: Sequence[str]) -> list[int]:
    """For each image, the index of the first one with the same content: its own, if there is none before.

    A tile is a copy of the same tile of an equal file.

    Of files of one size a few bytes are compared, and of those that agree all, so that a million files take a
    minute or two. Files that cannot be read, and empty ones, have no copies.
    """
    files = list(dict.fromkeys(map(file_of, paths)))
    original = dict(zip(files, [files[index] for index in _first_files(files)], strict=True))
    seen: dict[str, int] = {}
    first = []
    for index, path in enumerate(paths):
        file = file_of(path)
        first.append(seen.setdefault(original[file] + path[len(file) :], index))
    return first


def _first_files(paths: Sequence[str]) -> list[int]:
    """For each file, the index of the first one with the same content."""
    first = list(range(len(paths)))
    groups = [first.copy()]
    with ThreadPoolExecutor(THREADS) as threads:
        for key_of in (_size, _middle, digest_of_file):
            compared = [index for group in groups for index in group]
            parts = [compared[start : start + AT_ONCE] for start in range(0, len(compared), AT_ONCE)]
            found = threads.map(lambda part, of=key_of: [_or_none(of, paths[index]) for index in part], parts)
            keys = chain.from_iterable(tqdm(found, "looking for copies", total=len(parts), delay=2))
            key_at = dict(zip(compared, keys, strict=True))
            groups = [part for group in groups for part in _alike(group, key_at)]
    for group in groups:
        for index in group:
            first[index] = group[0]
    return first


def _alike(group: Sequence[int], key_at: dict[int, object]) -> list[list[int]]:
    """The parts of a group with two or more files of one key."""
    found = defaultdict(list)
    for index in group:
        if key_at[index]:
            found[key_at[index]].append(index)
    return [part for part in found.values() if len(part) > 1]


def _or_none(key_of: Callable[[str], object], path: str) -> object:
    try:
        return key_of(path)
    except OSError:
        return None


def _size(path: str) -> int:
    return os.stat(path).st_size


def _middle(path: str) -> bytes:
    with open(path, "rb") as file:
        file.seek(os.fstat(file.fileno()).st_size // 2)
        return file.read(PART)
