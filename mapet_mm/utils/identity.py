"""One identity for what decides a result: settings as JSON, their digest, and how two of them differ."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from difflib import SequenceMatcher
from functools import lru_cache
from heapq import nsmallest
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.config import ConfigDict

from mapet_mm.utils.atomic_files import replace_json
from mapet_mm.utils.errors import UserError

IDENTITY = "identity.json"
CORNER = re.compile(r"\d+,\d+")  # of a tile, behind a file's name and `#`
SAMPLED_FILES = 64
LARGEST_READ = 2**24  # bytes
SAMPLED_TAR_FILES = 8  # whose members are listed from the start


def as_json(value: Any, bare_types: bool = False) -> Any:
    """Settings as JSON has them, from which what a config describes can be built again.

    Tuples are lists, and classes and paths are strings. With `bare_types`, a `type` has no scope.
    """
    if isinstance(value, ConfigDict) and not bare_types:
        value = value.to_dict()  # with the whole path of a class that the config imports
    if isinstance(value, Mapping):
        plain = {str(key): as_json(one, bare_types) for key, one in value.items()}
        if bare_types and isinstance(plain.get("type"), str):
            plain["type"] = plain["type"].rpartition(".")[2]
        return plain
    if isinstance(value, list | tuple):
        return [as_json(one, bare_types) for one in value]
    if isinstance(value, str | int | float | None):
        return value
    if hasattr(value, "item"):  # a NumPy or PyTorch number
        return value.item()
    return getattr(value, "__qualname__", str(value))


def canonical(value: Any) -> Any:
    """Settings as JSON, alike for equal settings: however a config writes a `type`, its bare name is here."""
    return as_json(value, bare_types=True)


def digest(value: Any) -> str:
    """SHA-256 (hexadecimal) of settings."""
    return hashlib.sha256(json.dumps(canonical(value), sort_keys=True).encode()).hexdigest()


def digest_of_file(path: str | os.PathLike) -> str:
    """SHA-256 (hexadecimal) of a file's content, read in parts."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(2**20):
            found.update(part)
    return found.hexdigest()


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


def folder_of(parent: Path, identity: Mapping[str, Any], names: Iterable[str]) -> Path:
    """The folder of what was computed of images: named by all that decides it, but for where they lie.

    `images.json` in it has their digests. With images of which there are none, or in a folder that earlier
    versions have made, the name also stands for `data_root` in the identity.

    Raises:
        UserError: it was computed of other images with the same names.
    """
    by_path = parent / digest(identity)[:12]
    digests = {} if by_path.exists() else file_digests(identity["data_root"], names)
    if not digests:
        return by_path
    folder = parent / digest({key: value for key, value in identity.items() if key != "data_root"})[:12]
    record = folder / "images.json"
    if not record.exists():
        folder.mkdir(parents=True, exist_ok=True)
        replace_json(record, digests)
    remedy = "bring that one back, or remove the folder"
    require_same_files(json.loads(record.read_text()), identity["data_root"], f"`{folder}`", remedy)
    return folder


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
    import cv2

    if len(content) in (0, LARGEST_READ):
        return len(content) > 0
    try:
        return cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_GRAYSCALE) is not None
    except cv2.error:
        return False


def explain(before: Any, now: Any, key: str = "") -> str | None:
    """The first difference between two settings, as "optimizer.lr: 0.1, now 0.2"; None if they are equal.

    Of lists of unequal length, it is the first entry that was added or removed: "pipeline.2: added {...}".
    """
    before, now = canonical(before), canonical(now)
    if isinstance(before, dict) and isinstance(now, dict):
        return _first_difference(before, now, {**before, **now}, key)
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return _first_difference(dict(enumerate(before)), dict(enumerate(now)), range(len(now)), key)
    if isinstance(before, list) and isinstance(now, list):
        return _explain_lengths(before, now, key)
    return None if before == now else f"{key or 'value'}: {before}, now {now}"


def _first_difference(before: dict, now: dict, names: Iterable, key: str) -> str | None:
    for name in names:
        difference = explain(before.get(name), now.get(name), _inside(key, name))
        if difference:
            return difference
    return None


def _explain_lengths(before: list, now: list, key: str) -> str | None:
    """The first entry that only one of two lists of unequal length has."""
    as_text = [[json.dumps(entry, sort_keys=True) for entry in entries] for entries in (before, now)]
    changes = SequenceMatcher(None, *as_text, autojunk=False).get_opcodes()
    kind, old, _, new, _ = next(change for change in changes if change[0] != "equal")  # old, new: indices
    if kind == "insert":
        return f"{_inside(key, new)}: added {now[new]}"
    if kind == "delete":
        return f"{_inside(key, old)}: removed {before[old]}"
    return explain(before[old], now[new], _inside(key, old))


def _inside(key: str, name: str | int) -> str:
    return f"{key}.{name}" if key else str(name)


def require_settings(folder: Path, settings: Any, noun: str, remedy: str) -> None:
    """Write the settings of a new folder's files into `identity.json` beside them, or compare an old one's.

    Args:
        folder: made if it is absent.
        settings: whatever decides the folder's content.
        noun: names the folder in the message: "feature cache".
        remedy: what the user can do, for the message.

    Raises:
        UserError: the folder was made with other settings.
    """
    path = folder / IDENTITY
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        replace_json(path, canonical(settings))
    elif changed := explain(json.loads(path.read_text()), settings):
        raise UserError(f"{noun} `{folder}` was made with other settings ({changed}): {remedy}")
