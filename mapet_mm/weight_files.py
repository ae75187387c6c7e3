"""Read and write files of weights, without running any code that a file may hold."""

import argparse
import io
import json
import os
import re
import shutil
import socket
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals
from tqdm import tqdm

from mapet_mm.utils.atomic_files import new_file, replace_file
from mapet_mm.utils.dist import is_first_process, print_to_user
from mapet_mm.utils.errors import UserError, listed, reason_of
from mapet_mm.utils.identity import digest
from mapet_mm.utils.shared_work import shared_lock

# Keys under which checkpoints keep the network's weights, and averages of them beside.
KEYS = ("state_dict", "model")
AVERAGES = ("state_dict_ema", "model_ema")
# Parts of names that PyTorch's wrappers add: of several processes, of `torch.compile`, of recomputation.
WRAPPERS = re.compile(r"(^|\.)((module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.)+")
Value = TypeVar("Value")
SILENCE = 30  # seconds, after which a server is given up


class WeightFileError(UserError):
    """A file of weights cannot be read or written; the message is one line."""


def _statistic(owner: Any, name: str) -> Any:
    """`getattr` restricted to one of the four statistics of MMEngine's log buffers, which they need."""
    if owner is HistoryBuffer and name in ("min", "max", "current", "mean"):
        return getattr(HistoryBuffer, name)
    raise UnpicklingError(f"attribute {name!r} of {owner!r} is not read from a file")


# Objects that a training checkpoint may hold besides tensors and plain values: MMEngine's log buffers,
# NumPy's numbers and arrays in them, parsed arguments. `getattr` itself is not among them (it reaches the
# builtins of any function), nor is NumPy's type for objects. NumPy 1 saved the same under another name.
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
def only_safe_globals() -> Iterator[None]:
    """Let `torch.load(weights_only=True)` create only `SAFE_GLOBALS` and the types that it always allows.

    What the process allowed before is not allowed inside: MMEngine's list has `getattr`, by which a file can
    run anything.
    """
    before = get_safe_globals()
    clear_safe_globals()
    add_safe_globals(SAFE_GLOBALS)
    try:
        yield
    finally:
        imported = [
            one for one in get_safe_globals() if one not in SAFE_GLOBALS
        ]  # torch's modules add theirs
        clear_safe_globals()
        add_safe_globals([*before, *imported])


def read_weights(path: str | Path, key: str | None = None) -> dict[str, Tensor]:
    """The state dict in a .safetensors file, in what `torch.save` wrote, or in a folder's model.safetensors.

    A file at an https:// address is fetched first (see `fetch`). Names come without those of PyTorch's
    wrappers (see `without_wrappers`).

    The content, not the name, decides the file's format. Nothing that a pickled checkpoint names is run; one
    that holds anything but tensors, plain values, arguments and MMEngine's log buffers is refused.

    Args:
        path: of the file or folder, or an https:// address.
        key: entry of the checkpoint that has the weights; None for the checkpoint itself or its `state_dict`
            or `model`, unless it has averaged weights beside them.

    Raises:
        WeightFileError: no such file, no weights in it, more than one set of them, or an object that is not
            read; or an address that is not https:// or cannot be fetched.
    """
    return read_checkpoint(path, key)[0]


def read_checkpoint(path: str | Path, key: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """As `read_weights`, with the metadata: MMEngine's `meta`, or the texts in a .safetensors header."""
    content, header = _read(path)
    if header is not None:
        return without_wrappers(content), header
    meta = content.get("meta") if isinstance(content, dict) else None
    weights = without_wrappers(find_state_dict(content, key, Path(path)))
    return weights, dict(meta) if isinstance(meta, dict) else {}


def without_wrappers(weights: Mapping[str, Value]) -> dict[str, Value]:
    """Weights under the names that they have inside PyTorch's wrappers: `module.`, `_orig_mod.`, ...

    If two would then have one name, all keep their own.

    Examples:
        >>> without_wrappers({"module._orig_mod.backbone.cls_token": 1})
        {'backbone.cls_token': 1}
    """
    renamed = {without_wrapper(name): value for name, value in weights.items()}
    return renamed if len(renamed) == len(weights) else dict(weights)


def without_wrapper(name: str) -> str:
    """A name, or the beginning of one up to a dot, as it is inside PyTorch's wrappers."""
    return WRAPPERS.sub(r"\1", name)


def read_entries(path: str | Path) -> dict[str, Any]:
    """All entries of a checkpoint by name, weights and others, or the texts in a .safetensors header.

    timm's saver leaves `epoch`, `metric` and `args` beside the weights, MMEngine `meta`.

    Raises:
        WeightFileError: as for `read_weights`, or the checkpoint is not a dict.
    """
    content, header = _read(path)
    if header is not None:
        return dict(header)
    if not isinstance(content, dict):
        raise WeightFileError(f"{path} is a {type(content).__name__}, not a checkpoint with named entries")
    return dict(content)


def _read(path: str | Path) -> tuple[Any, dict[str, str] | None]:
    """A file's content, and its header if it is .safetensors; no code in it is run."""
    is_fetched = "://" in str(path)
    path = fetch(str(path)) if is_fetched else Path(path)
    path = path / "model.safetensors" if path.is_dir() else path
    if not path.is_file():
        raise WeightFileError(f"{path} does not exist")
    try:
        with open(path, "rb") as file:
            is_safetensors = file.read(9)[8:] == b"{"
        if is_safetensors:
            with safe_open(path, "pt") as file:
                content = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return content, file.metadata() or {}
        with only_safe_globals():
            return torch.load(path, map_location="cpu", weights_only=True), None
    except Exception as error:  # a damaged file can raise any error
        met = error.__context__ if isinstance(error, UnpicklingError) and error.__context__ else error
        reason = f"{type(met).__name__}: {met}".partition("\n")[0].partition(". Please")[0]
        remedy = "if you trust it, save its weights alone by torch.save(model.state_dict(), FILE)"
        if is_fetched:  # earlier versions kept a download that had broken off
            remedy = f"remove it to fetch it again; {remedy}"
        raise WeightFileError(
            f"{path} is not a checkpoint of tensors and plain values ({reason[:200]}): {remedy}"
        ) from error


def fetch(address: str) -> Path:
    """Fetch a file at an https:// address into PyTorch's cache, in one process of all that share it.

    The file keeps its name, in a folder named after the whole address: addresses of different weights often
    end alike.

    Raises:
        WeightFileError: the address is not https://, or the file cannot be fetched.
    """
    if not address.startswith("https://"):
        raise WeightFileError(
            f"{address}: weights are read from files and from https:// addresses alone; what comes over "
            "plain http can be changed on its way"
        )
    folder = Path(torch.hub.get_dir(), "checkpoints", digest(address)[:16])
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / os.path.basename(address.partition("?")[0])
    with shared_lock(file.with_name(f"{file.name}.lock")):
        if not file.is_file():
            download(address, file)
    return file


def download(address: str, file: Path) -> None:
    """Download a file, which appears when it is whole.

    Raises:
        WeightFileError: the server cannot be reached, says nothing for 30 s, or breaks off.
    """
    print_to_user(f"fetching {address}")
    remedy = f"or put the file at {file}"
    request = urllib.request.Request(address, headers={"User-Agent": "mapet_mm"})
    try:
        with urllib.request.urlopen(request, timeout=SILENCE) as response, new_file(file) as partial:
            length = int(response.headers.get("Content-Length") or 0)
            bar = dict(total=length, desc=file.name, disable=not is_first_process())
            with open(partial, "wb") as written, tqdm.wrapattr(written, "write", **bar) as counted:
                shutil.copyfileobj(response, counted)
            size = partial.stat().st_size
            if size < length:  # which `response` reads like the end
                raise WeightFileError(
                    f"{address} broke off after {size:,} of {length:,} bytes: run the same command again, "
                    + remedy
                )
    except (OSError, HTTPException) as error:
        raise WeightFileError(
            f"could not fetch {address} ({reason_of(error)[:160]}): check the network, {remedy}"
        ) from None


def require_answer(address: str, remedy: str) -> None:
    """Ask a server for anything, because libraries wait for a silent one many times.

    Raises:
        WeightFileError: it says nothing for 30 s. Of any other error, the library tells more.
    """
    request = urllib.request.Request(address, method="HEAD", headers={"User-Agent": "mapet_mm"})
    try:
        urllib.request.urlopen(request, timeout=SILENCE).close()
    except OSError as error:
        if isinstance(getattr(error, "reason", error), TimeoutError):
            raise WeightFileError(
                f"{address} says nothing for {SILENCE} s: check the network and the proxy; {remedy}"
            ) from None


@contextmanager
def limited_silence() -> Iterator[None]:
    """Let the downloads of libraries give up a server that says nothing for 30 s, which they wait for."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENCE)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


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


def find_state_dict(content: Any, key: str | None, path: Path) -> dict[str, Tensor]:
    """The weights in a file's content: under `key`, under one of the usual keys, or the content itself."""
    entries = content if isinstance(content, dict) else {}
    averages = [name for name in AVERAGES if name in entries]
    if key is None and averages:
        others = [name for name in KEYS if name in entries]
        raise WeightFileError(
            f"{path} has {' and '.join(f'`{name}`' for name in [*others, *averages])}: choose one with "
            f"`key`, for example mapet-mm convert mm mm {path} OUT.pth --key {averages[-1]}"
        )
    # A file of ours may have one inside the other.
    for name in KEYS if key is None else (key,):
        if isinstance(entries.get(name), dict):
            entries = entries[name]
    weights = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    if weights:
        return weights
    counts = {name: _num_tensors(value) for name, value in entries.items()}
    others = [name for name, count in counts.items() if count]
    if others and key is None:
        example = max(reversed(others), key=counts.get)
        raise WeightFileError(
            f"{path} has weights under {listed(others, most=8)}: choose one with `key`, for example "
            f"mapet-mm convert mm mm {path} OUT.pth --key {example}"
        )
    names = listed([str(name) for name in entries], most=8) or "none"
    raise WeightFileError(f"{path} has no tensors, nor under {key or ' or '.join(KEYS)}; it has {names}")


def _num_tensors(entry: Any) -> int:
    """How many tensors an entry of a checkpoint has by name."""
    values = entry.values() if isinstance(entry, dict) else ()
    return sum(isinstance(value, Tensor) for value in values)
