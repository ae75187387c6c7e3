"""Weights from and to files, without running any code that a file may hold."""

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from mapet_mm.errors import UserError
from mapet_mm.file_replacement import replace_file

# Where checkpoints keep the network's weights.
KEYS = ("state_dict", "model")
PLAIN = {("collections", "OrderedDict"): OrderedDict, ("builtins", "set"): set}


class WeightFileError(UserError):
    """A file that cannot be read as weights, or not be written; the message is one line."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """The state dict in a .safetensors file or in what `torch.save` wrote.

    Of a pickled checkpoint only tensors and plain values are made; anything else in it (arguments, log
    buffers) is passed over, so that checkpoints from anywhere can be read.

    Raises:
        WeightFileError: no such file, or no weights in it.
    """
    if not path.is_file():
        raise WeightFileError(f"{path} does not exist")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", pickle_module=_TensorsOnly, weights_only=False)
    except Exception as error:  # what a broken file raises depends on where it is broken
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise WeightFileError(f"{path} is no checkpoint ({reason})") from error
    for key in KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        raise WeightFileError(f"{path} holds no weights, but a {type(content).__name__}")
    weights = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    if not weights:
        raise WeightFileError(f"{path} holds no weights: no tensors, nor any under {' or '.join(KEYS)}")
    return weights


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


class _Ignored:
    """Stands where a pickled object was; takes whatever its pickle does to it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> "_Ignored":
        return self

    def __setstate__(self, state: Any) -> None:
        pass

    append = extend = add = __setitem__ = __call__


class _TensorsOnly:
    """A pickle module for `torch.load`."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            """Only what rebuilds tensors and plain containers; nothing else is imported, let alone called."""
            if (module, name) in PLAIN:
                return PLAIN[module, name]
            rebuilds = module == "torch._utils" and name.startswith("_rebuild_")
            is_plain_type = name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
            if rebuilds or (module == "torch" and is_plain_type):
                return super().find_class(module, name)
            return _Ignored

    @staticmethod
    def load(file: Any, **kwargs: Any) -> Any:
        return _TensorsOnly.Unpickler(file, **kwargs).load()
