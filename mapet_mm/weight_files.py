"""Weights from and to files, without running any code that a file may hold."""

import argparse
import io
import re
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from safetensors.torch import load_file, save
from torch import Tensor
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

from mapet_mm.errors import UserError
from mapet_mm.file_replacement import replace_file

# Where checkpoints keep the network's weights.
KEYS = ("state_dict", "model")
ZIP = b"PK\x03\x04"
_LOCK = threading.Lock()


class WeightFileError(UserError):
    """A file that cannot be read as weights, or not be written; the message is one line."""


def _statistic(owner: Any, name: str) -> Any:
    """`getattr` as far as MMEngine's log buffers need it: one of their own four statistics."""
    if owner is HistoryBuffer and name in ("min", "max", "current", "mean"):
        return getattr(HistoryBuffer, name)
    raise UnpicklingError(f"attribute {name!r} of {owner!r} is not read from a file")


# What a training checkpoint may hold besides tensors and plain values, as `torch.serialization.safe_globals`
# takes it: MMEngine's log buffers, NumPy's numbers and arrays in them, parsed arguments. `getattr` itself is not
# among them (it reaches the builtins of any function), nor is NumPy's type for objects. NumPy 1 wrote the same
# functions under another name.
_NUMPY = {
    "scalar": np.float64(0).__reduce__()[0],
    "_reconstruct": np.zeros(0).__reduce__()[0],
}
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
    """`torch.load(weights_only=True)` makes exactly `allowed` besides torch's own; what was allowed before is
    again afterwards."""
    with _LOCK:  # torch keeps one list for the process
        before = get_safe_globals()
        clear_safe_globals()
        add_safe_globals(list(allowed))
        try:
            yield
        finally:
            clear_safe_globals()
            add_safe_globals(before)


class _StandIn:
    """Stands where an object was that is no tensor; takes what its pickle gives it and does nothing."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> "_StandIn":
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The state dict in a .safetensors file, in what `torch.save` wrote, or in a folder's model.safetensors.

    The content decides what a file is, not its name. Only tensors and plain values are made of a pickled
    checkpoint; whatever else it names (arguments, log buffers, a function to call) is neither imported nor
    run, and is passed over, unless it stands among the weights.

    Raises:
        WeightFileError: no such file, no weights in it, or a form that cannot be read without running it.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "model.safetensors"
    if not path.is_file():
        raise WeightFileError(f"{path} does not exist")
    try:
        with open(path, "rb") as file:
            start = file.read(64)
        if mistaken := _no_weights(start):
            raise ValueError(mistaken)
        content = load_file(path) if start[8:9] == b"{" else _load_inert(path)
    except Exception as error:  # what a broken file raises depends on where it is broken
        raise WeightFileError(f"{path} is no checkpoint ({_reason(error)})") from error
    return _state_dict(content, path)


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a state dict as .safetensors, or as .pth (a dict with `state_dict`, as MMEngine's).

    Raises:
        WeightFileError: another ending.
    """
    if path.suffix == ".safetensors":
        contiguous = {name: value.contiguous() for name, value in weights.items()}
        content = save(contiguous, metadata={"format": "pt"})  # as transformers wants it
    elif path.suffix == ".pth":
        buffer = io.BytesIO()
        torch.save({"state_dict": dict(weights)}, buffer)
        content = buffer.getvalue()
    else:
        raise WeightFileError(f"{path}: the name has to end in .safetensors or .pth")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)


def _no_weights(start: bytes) -> str:
    """What a file is that starts so, if it is one of those often found in place of weights."""
    if not start:
        return "it is empty"
    if start.startswith(b"version https://git-lfs"):
        return "it is Git LFS's pointer to the file: fetch that with `git lfs pull`"
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "it is a web page: the download failed, open it to see why"
    return ""


def _load_inert(path: Path) -> Any:
    """What `torch.save` wrote, with a stand-in for each object that torch does not make by itself."""
    names = {
        one[1] if isinstance(one, tuple) else f"{one.__module__}.{one.__qualname__}" for one in SAFE_GLOBALS
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected pickle protocol")  # what cannot be read of it raises
        with path.open("rb") as file, only_safe_globals([]):
            if file.read(4) == ZIP:  # the format before it does not tell its names
                names |= set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        with only_safe_globals([(type(name, (_StandIn,), {}), name) for name in names]):
            return torch.load(path, map_location="cpu", weights_only=True)


def _reason(error: Exception) -> str:
    """One line of an error; of torch's paragraphs on unpickling the sentence that tells what was met."""
    text = str(error)
    if "legacy .tar format" in text:
        return "torch's tar format of before 2017, which cannot be read without running it"
    if found := re.search(r"WeightsUnpickler error: (.*)", text):
        text = found[1]
    elif "torchscript" in text.lower():
        text = "a TorchScript program, not a state dict"
    text = text.splitlines()[0] if text else ""
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def _state_dict(content: Any, path: Path) -> dict[str, Tensor]:
    for key in KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        raise WeightFileError(f"{path} holds no weights, but a {type(content).__name__}")
    for name, value in content.items():
        if isinstance(value, _StandIn):
            raise WeightFileError(f"{path}: `{name}` is a {type(value).__name__}, where a tensor is expected")
    weights = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    if not weights:
        raise WeightFileError(f"{path} holds no weights: no tensors, nor any under {' or '.join(KEYS)}")
    return weights
