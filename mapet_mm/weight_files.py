"""Read and write files of weights, without running any code that a file may hold."""

import argparse
import io
import json
import re
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.errors import UserError

# Keys under which checkpoints keep the network's weights.
KEYS = ("state_dict", "model")
_LOCK = threading.Lock()


class WeightFileError(UserError):
    """A file of weights cannot be read or written; the message is one line."""


def _statistic(owner: Any, name: str) -> Any:
    """`getattr` restricted to what MMEngine's log buffers need: one of their four statistics."""
    if owner is HistoryBuffer and name in ("min", "max", "current", "mean"):
        return getattr(HistoryBuffer, name)
    raise UnpicklingError(f"attribute {name!r} of {owner!r} is not read from a file")


# Objects that a training checkpoint may hold besides tensors and plain values, for
# `torch.serialization.safe_globals`: MMEngine's log buffers, NumPy's numbers and arrays in them, parsed
# arguments. `getattr` itself is not among them (it reaches the builtins of any function), nor is NumPy's type
# for objects. NumPy 1 saved the same functions under another name.
_NUMPY = {"scalar": np.float64(0).__reduce__()[0], "_reconstruct": np.zeros(0).__reduce__()[0]}
SAFE_GLOBALS: list[Any] = [
    argparse.Namespace,
    HistoryBuffer,
    (_statistic, "builtins.getattr"),
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in np.typecodes["All"] if code not in "OV"},
    *(
        (made, f"numpy.{core}.multiarray.{name}")
        for name, made in _NUMPY.items()
        for core in ("core", "_core")
    ),
]


@contextmanager
def only_safe_globals(allowed: Sequence[Any] = SAFE_GLOBALS) -> Iterator[None]:
    """Let `torch.load(weights_only=True)` create only `allowed` and the types that it always allows.

    Other lists are ignored inside (MMEngine's has `getattr`, with which a file can run anything). They are
    restored afterwards.
    """
    with _LOCK:  # torch keeps one list per process
        before = get_safe_globals()
        clear_safe_globals()
        add_safe_globals(list(allowed))
        try:
            yield
        finally:
            imported = set(get_safe_globals()) - set(allowed)  # torch modules add theirs when imported
            clear_safe_globals()
            add_safe_globals([*before, *imported])


class _StandIn:
    """Replaces an object that is not a tensor; accepts the pickle's arguments and state and ignores them."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> "_StandIn":
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


def _stand_in(name: str) -> type[_StandIn]:
    """A stand-in that error messages name after the object that it replaces."""
    module, _, last = name.rpartition(".")
    return type(last, (_StandIn,), {"__module__": module, "__slots__": ()})


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The state dict in a .safetensors file, in what `torch.save` wrote, or in a folder's model.safetensors.

    The content, not the name, decides the file's format. Only tensors and plain values of a pickled
    checkpoint are loaded; anything else that it names (arguments, log buffers, a function to call) is neither
    imported nor run, and is ignored unless it is among the weights.

    Raises:
        WeightFileError: no such file, no weights in it, or a format that cannot be read without running its
            code.
    """
    return read_checkpoint(path)[0]


def read_checkpoint(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """As `read_weights`, with the file's metadata as plain values: MMEngine's `meta` (whose `cfg` is the
    config's text), or the texts in a .safetensors header."""
    path = Path(path)
    if path.is_dir():
        path = path / "model.safetensors"
    if not path.is_file():
        raise WeightFileError(f"{path} does not exist")
    try:
        with open(path, "rb") as file:
            start = file.read(64)
        if not_weights := _other_file(start):
            raise WeightFileError(not_weights)
        if start[8:9] == b"{":
            with safe_open(path, "pt") as file:
                content = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                meta = file.metadata() or {}
        else:
            content = _load_inert(path, start)
            meta = _plain_values(content)
    except Exception as error:  # a damaged file can raise any error
        raise WeightFileError(f"{path} is no checkpoint ({_reason(error)})") from error
    return _state_dict(content, path), meta


def non_finite(network: nn.Module) -> str | None:
    """Name of a network's first parameter with NaN or infinity, or buffer with NaN; None if there is none.

    Infinity in a buffer may be meant, as in a mask of attention.
    """
    parameters = (name for name, value in network.named_parameters() if not value.isfinite().all())
    buffers = (name for name, value in network.named_buffers() if value.isnan().any())
    return next(chain(parameters, buffers), None)


def write_weights(path: Path, weights: Mapping[str, Tensor], meta: Mapping[str, Any] | None = None) -> None:
    """Write a state dict as .safetensors, or as .pth (a dict with `state_dict` and `meta`, as MMEngine's).

    Args:
        path: ends in .safetensors or .pth.
        weights: the state dict.
        meta: metadata in plain values; in .safetensors as text, as JSON if needed.

    Raises:
        WeightFileError: the path has another suffix.
    """
    meta = dict(meta or {})
    if path.suffix == ".safetensors":
        # Copied, because the format does not support shared memory.
        apart = {name: value.clone(memory_format=torch.contiguous_format) for name, value in weights.items()}
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in meta.items()}
        content = save(apart, metadata={"format": "pt", **texts})  # transformers requires "format"
    elif path.suffix == ".pth":
        buffer = io.BytesIO()
        torch.save({"state_dict": dict(weights), "meta": meta}, buffer)
        content = buffer.getvalue()
    else:
        raise WeightFileError(f"{path}: the name has to end in .safetensors or .pth")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)


def _other_file(start: bytes) -> str:
    """Describe a file by its first bytes, if it is of a type often found instead of weights."""
    if not start:
        return "it is empty"
    if start.startswith(b"version https://git-lfs"):
        return "it is Git LFS's pointer to the file: fetch that with `git lfs pull`"
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "it is a web page: the download failed, open it to see why"
    return ""


def _load_inert(path: Path, start: bytes) -> Any:
    """Load what `torch.save` wrote, with a stand-in for each object that torch does not allow by default."""
    names = {
        one[1] if isinstance(one, tuple) else f"{one.__module__}.{one.__qualname__}" for one in SAFE_GLOBALS
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected pickle protocol")  # bad content raises an error
        if start.startswith(b"PK"):  # the older format does not list its names
            with only_safe_globals([]):
                names |= set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        with only_safe_globals([(_stand_in(name), name) for name in names]):
            return torch.load(path, map_location="cpu", weights_only=True)


def _reason(error: Exception) -> str:
    """One line of an error: torch's description of the object, without its advice to trust the file."""
    if isinstance(error, WeightFileError):
        return str(error)
    met = error.__context__ if isinstance(error, UnpicklingError) and error.__context__ else error
    sentence = re.split(r"\.? [A-Z]\w+ use |\. In |\.?\n", str(met) + "\n")[0]
    if isinstance(met, UnpicklingError):
        sentence += (
            "; only tensors and plain values are read, as torch.save(model.state_dict(), FILE) writes them"
        )
    return f"{type(met).__name__}: {sentence}"


def _state_dict(content: Any, path: Path) -> dict[str, Tensor]:
    """The weights in a file's content. Calls dict's methods, because a file can override an OrderedDict's."""
    for key in KEYS:
        if isinstance(content, dict) and isinstance(dict.get(content, key), dict):
            content = content[key]
    if not isinstance(content, dict):
        raise WeightFileError(f"{path} holds no weights, but a {type(content).__name__}")
    entries = dict(dict.items(content))
    for name, value in entries.items():
        if isinstance(value, _StandIn):
            kind = f"{type(value).__module__}.{type(value).__name__}"
            raise WeightFileError(f"{path}: `{name}` is a {kind}, where a tensor is expected")
    weights = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    if not weights:
        raise WeightFileError(f"{path} holds no weights: no tensors, nor any under {' or '.join(KEYS)}")
    return weights


def _plain_values(content: Any) -> dict[str, Any]:
    """The entries of a checkpoint's `meta` that JSON can represent."""
    meta = dict.get(content, "meta") if isinstance(content, dict) else None
    plain = {}
    for name, value in dict.items(meta) if isinstance(meta, dict) else ():
        with suppress(TypeError, ValueError):
            json.dumps(value)
            plain[name] = value
    return plain
