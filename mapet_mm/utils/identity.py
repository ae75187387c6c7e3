"""One identity for what decides a result: settings as JSON, their digest, and how two of them differ."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mapet_mm.utils.atomic_files import replace_json
from mapet_mm.utils.errors import UserError

IDENTITY = "identity.json"


def canonical(value: Any) -> Any:
    """Settings as JSON has them, alike for equal settings.

    A `type` is its bare name, however a config writes it (`mmpretrain.Resize`, the class itself), tuples are
    lists, and paths are strings.
    """
    if isinstance(value, Mapping):
        plain = {str(key): canonical(one) for key, one in value.items()}
        if isinstance(plain.get("type"), str):
            plain["type"] = plain["type"].rpartition(".")[2]
        return plain
    if isinstance(value, list | tuple):
        return [canonical(one) for one in value]
    if isinstance(value, str | int | float | None):
        return value
    if hasattr(value, "item"):  # a NumPy or PyTorch number
        return value.item()
    return getattr(value, "__qualname__", str(value))


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
    """The first difference between two settings, as "optimizer.lr: 0.1, now 0.2"; None if they are equal."""
    before, now = canonical(before), canonical(now)
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = [(name, before.get(name), now.get(name)) for name in {**before, **now}]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = [(str(place), *pair) for place, pair in enumerate(zip(before, now, strict=True))]
    else:
        return None if before == now else f"{key or 'value'}: {before}, now {now}"
    found = (explain(old, new, f"{key}.{name}".lstrip(".")) for name, old, new in pairs)
    return next(filter(None, found), None)


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
