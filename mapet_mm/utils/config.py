"""Config files, their dataset (which the environment variable MAPET_MM_DATA names), and their entries."""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from numbers import Integral
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.registry import MODELS, WEIGHT_INITIALIZERS, Registry

from mapet_mm.dependencies import import_quietly
from mapet_mm.utils.commands import PACKAGE
from mapet_mm.utils.errors import LaunchError

VARIABLE = "MAPET_MM_DATA"
# Lowest and highest value of entries with these names, wherever they are in a config; NumPy's for seeds.
NUMBERS = {"num_workers": (0, math.inf), "batch_size": (1, math.inf), "seed": (0, 2**32 - 1)}
LIBRARIES = ("mmpretrain", "mmseg", "mmdet", "mmrotate", "mmpose")


@contextmanager
def data_set(name: str | None) -> Iterator[None]:
    """Within this context, read configs for this dataset; None keeps the environment's."""
    before = os.environ.get(VARIABLE)
    if name is not None:
        os.environ[VARIABLE] = name
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def in_package(path: str) -> str:
    """The path itself, or the package's file of this name (`configs/...`) if the working folder has none."""
    packaged = PACKAGE / path
    if not Path(path).exists() and packaged.is_file():
        return str(packaged)
    return path


def read_config(
    path: str | os.PathLike, data: str | None = None, options: Mapping[str, Any] | None = None
) -> Config:
    """Read a config for a dataset, and merge `--cfg-options` into it.

    Args:
        path: of the file, or of one in the package (`configs/...`) where the working folder has none.
        data: name of the dataset; None takes the environment's.
        options: entries to change, with dotted keys.

    Raises:
        FileNotFoundError: there is no such file or dataset.
        LaunchError: a seed, a batch size or a number of workers cannot be one.
    """
    with data_set(data):
        logging.disable(logging.INFO)  # MMEngine logs each use of the variable
        try:
            cfg = Config.fromfile(in_package(os.fspath(path)))
        finally:
            logging.disable(logging.NOTSET)
    cfg.merge_from_dict(dict(options or {}))
    check_numbers(cfg)
    if "default_scope" in cfg and cfg.default_scope is None:  # as configs in MMEngine's Python style say
        cfg.default_scope = scope_of(cfg)
    if cfg.get("default_scope") == "mmseg":  # before MMEngine does, for whatever it builds of this scope
        with suppress(ImportError):  # who builds of it says that it is missing
            import_quietly("mmseg.datasets")
    return cfg


def check_numbers(cfg: Config) -> None:
    """Raise LaunchError for a seed, a batch size or a number of workers that cannot be one, with its key."""
    for key, value in nodes(cfg.to_dict()):
        low, high = NUMBERS.get(key.rpartition(".")[2], (None, None))
        if low is None or value is None:
            continue
        if isinstance(value, Integral) and low <= value <= high:
            continue
        limit = " on"
        if high < math.inf:
            limit = f" to {high}"
        raise LaunchError(
            f"config {cfg.filename}: `{key}` is {value!r}: give a whole number from {low}{limit}"
        )


def require_entries(cfg: Config, *keys: str, remedy: str = "") -> None:
    """Raise LaunchError if a config lacks one of these entries; `remedy` says which config to take."""
    for key in keys:
        if not cfg.get(key):
            more = f": {remedy}" if remedy else ""
            raise LaunchError(f"config {cfg.filename} has no `{key}`, which this needs{more}")


def scope_of(cfg: Config) -> str:
    """The scope of a config's names: its own, or the library of its model; MMPretrain's if it has none."""
    if cfg.get("default_scope"):
        return cfg.default_scope
    model = cfg.get("model") or {}
    kind = None
    if "type" in model:
        kind = class_of(model["type"], MODELS)
    packages = [base.__module__.partition(".")[0] for base in getattr(kind, "__mro__", ())]
    return next((name for name in packages if name in LIBRARIES), "mmpretrain")


def type_name(kind: str | Callable) -> str:
    """Name of what a config's `type` stands for: a name, with its scope or path, or the class itself."""
    return kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__


def class_of(kind: str | Callable, registry: Registry) -> Callable | None:
    """The class that a config's `type` stands for; None if the registry lacks it."""
    return registry.get(kind) if isinstance(kind, str) else kind


def nodes(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Each dict, list and leaf in a part of a config, with its key: `model.backbone.init_cfg`."""
    yield key, config
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(config, Mapping):
        children = config.items()
    elif isinstance(config, list | tuple):
        children = enumerate(config)
    prefix = f"{key}." if key else ""
    for name, child in children:
        yield from nodes(child, f"{prefix}{name}")


def pretrained_entries(config: Any, key: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each `dict(type="Pretrained", checkpoint=...)` inside a part of a config, with its key."""
    pretrained = WEIGHT_INITIALIZERS.get("Pretrained")
    for name, node in nodes(config, key):
        has_weights = isinstance(node, Mapping) and "checkpoint" in node
        if has_weights and class_of(node.get("type"), WEIGHT_INITIALIZERS) is pretrained:
            yield name, node


def as_python(value: Any) -> str:
    """A value as configs have it.

    Examples:
        >>> as_python(dict(type="Pretrained", steps=[1, None]))
        'dict(type="Pretrained", steps=[1, None])'
    """
    if isinstance(value, Mapping):
        return f"dict({', '.join(f'{name}={as_python(each)}' for name, each in value.items())})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_python, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def shell_command(cfg: Config, words: Iterable[str | os.PathLike]) -> str:
    """A command of `mapet-mm` as typed in a shell, with the variables that its config was read with.

    Examples:
        >>> shell_command(Config(), ["test", "my config.py"])
        "mapet-mm test 'my config.py'"
    """
    variables = "".join(f"{name}={shlex.quote(value)} " for name, value in cfg.env_variables.items())
    return variables + shlex.join(["mapet-mm", *map(os.fspath, words)])
