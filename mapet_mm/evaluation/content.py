"""Digest of any value by what it holds, for what a dataset says of its images."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor


def content(value: Any) -> str:
    """Digest of any value by what it holds: the same in every process, and for any order of a dict's keys.

    Raises:
        TypeError: an object that cannot be pickled, as an open file.
    """
    kind, parts = _parts(value)
    known = hashlib.sha256(kind.encode())
    for part in parts:
        part = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        known.update(f"|{len(part)}|".encode() + part)
    return known.hexdigest()


def _parts(value: Any) -> tuple[str, list[str | bytes]]:
    """A value's kind, and what it holds as text or bytes."""
    if isinstance(value, Tensor):
        array = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return "tensor", [str(value.dtype), str(tuple(value.shape)), array.tobytes()]
    if isinstance(value, np.ndarray | np.generic):
        held = content(value.tolist()) if value.dtype.hasobject else value.tobytes()
        return "array", [str(value.dtype.descr), str(value.shape), held]
    if isinstance(value, Mapping):
        return "mapping", sorted(content(key) + content(one) for key, one in value.items())
    if isinstance(value, set | frozenset):
        return "set", sorted(map(content, value))
    if isinstance(value, list | tuple):
        return "list", [content(one) for one in value]
    if isinstance(value, str | PurePath):
        return "text", [str(value)]
    if isinstance(value, bytes | bytearray):
        return "bytes", [bytes(value)]
    if value is None or type(value) in (bool, int, float, complex):
        return "plain", [repr(value)]
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return "name", [str(value.__module__), value.__qualname__]
    # As pickle takes an object apart, but pickle's own bytes depend on which parts are one object.
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return "name", [type(value).__module__, reduced]
    made, arguments, state, *items = (*reduced, None, None, None)[:5]
    return "object", [content(one) for one in (made, arguments, state, *(list(some or ()) for some in items))]
