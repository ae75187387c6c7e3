"""What files hold, read once: after that, size and time of change tell whether a file is to be read again."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from jaxtyping import Int64
from tqdm import tqdm

from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.dist import is_first_process
from mapet_mm.utils.identity import digest_of_file
from mapet_mm.utils.shared_work import SharedTasks

# Files whose digests are kept together, and that one process reads at a time.
PART = 2048
THREADS = 8
NO_FILE = -1
KNOWN = np.dtype([("stat", "<i8", (2,)), ("sha256", "u1", (32,))])


def digest_of_files(paths: Sequence[str]) -> str:
    """Digest of what some files hold, which are all read; one that cannot be read holds nothing."""
    with ThreadPoolExecutor(THREADS) as pool:
        return hashlib.sha256(b"".join(pool.map(_sha256, paths))).hexdigest()


def known_digest_of_files(paths: Sequence[str], stats: Int64[np.ndarray, "file 2"], cache: Path) -> str:
    """Digest of what some files hold, of which only those are read that have changed; '' if none is here.

    Any number of processes share the reading.

    Args:
        paths: in this order; what is no file on this machine counts as nothing.
        stats: of these files, by `file_stats`.
        cache: a folder in it keeps each file's size, time of change and digest.
    """
    if (stats == NO_FILE).all():
        return ""
    names = "\n".join(paths).encode("utf-8", "surrogatepass")
    folder = cache / "files" / hashlib.sha256(names).hexdigest()[:16]
    found: dict[int, np.ndarray] = {}

    def done(parts: Sequence[int]) -> set[int]:
        for part in (part for part in parts if part not in found):
            known = _read(folder / f"{part:06d}.npy")
            if known is not None and np.array_equal(known["stat"], stats[_rows(part)]):
                found[part] = known
        return {part for part in parts if part in found}

    parts = range(-(-len(paths) // PART))
    tasks = SharedTasks(folder / "claims", parts, done)
    bar = tqdm(total=len(paths), desc="reading files", unit="file", delay=2, disable=not is_first_process())
    with bar, ThreadPoolExecutor(THREADS) as pool:
        for part in tasks:
            known = np.empty(len(stats[_rows(part)]), KNOWN)
            known["stat"] = stats[_rows(part)]  # of before: what changes meanwhile is read again
            digests = b"".join(pool.map(_sha256, paths[_rows(part)]))
            known["sha256"] = np.frombuffer(digests, np.uint8).reshape(-1, 32)
            content = io.BytesIO()
            np.save(content, known)
            replace_file(folder / f"{part:06d}.npy", content.getvalue())
            found[part] = known
            bar.update(len(known))
    tasks.clear()
    return hashlib.sha256(b"".join(found[part]["sha256"].tobytes() for part in parts)).hexdigest()


def file_stats(paths: Sequence[str]) -> Int64[np.ndarray, "file 2"]:
    """Size in bytes and time of change in ns of each file; `NO_FILE` for what is no file here."""
    return np.array([_stat(path) for path in paths], np.int64).reshape(-1, 2)


def _stat(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return NO_FILE, NO_FILE
    return found.st_size, found.st_mtime_ns


def _rows(part: int) -> slice:
    return slice(part * PART, (part + 1) * PART)


def _sha256(path: str) -> bytes:
    try:
        return bytes.fromhex(digest_of_file(path))
    except OSError:
        return bytes(32)


def _read(path: Path) -> np.ndarray | None:
    try:
        return np.load(path)
    except (OSError, ValueError, EOFError):  # not there, or damaged
        return None
