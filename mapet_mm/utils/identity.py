"""One identity for what decides a result: settings as JSON, their digest, and how two of them differ."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from mmengine.config import ConfigDict

from mapet_mm.utils.atomic_files import replace_json
from mapet_mm.utils.errors import UserError

IDENTITY = "identity.json"


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
