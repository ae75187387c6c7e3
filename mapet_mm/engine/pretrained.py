"""Weights that parts of a model start from: `init_cfg=dict(type="Pretrained", checkpoint=...)`."""

from collections.abc import Iterator
from typing import Any

from mmengine.config import Config, ConfigDict
from mmengine.model import PretrainedInit
from mmengine.registry import WEIGHT_INITIALIZERS

from mapet_mm.config_files import class_of
from mapet_mm.engine.checkpoints import LaunchError, require_checkpoint


def check_pretrained(cfg: Config, trust: bool) -> None:
    """Check that each `init_cfg=dict(type="Pretrained")` names a file, unless `load_from` brings the weights.

    Raises:
        LaunchError: one leaves it open, or the file is not there.
    """
    for key, init_cfg in reversed(list(_pretrained(cfg.model, "model"))):
        if init_cfg.checkpoint:
            require_checkpoint(f"`{key}.checkpoint`", init_cfg.checkpoint, trust)
        elif cfg.get("load_from"):
            _remove(cfg, key)
        else:
            raise LaunchError(
                f"the config leaves `{key}.checkpoint` open: --cfg-options {key}.checkpoint=CHECKPOINT, "
                f"or {key}=None to start from random weights"
            )


def _remove(cfg: Config, key: str) -> None:
    """Set an entry of a config to None, or take it out of its list."""
    *parts, last = key.split(".")
    parent = cfg
    for part in parts:
        parent = parent[int(part) if isinstance(parent, list) else part]
    if isinstance(parent, list):
        parent.pop(int(last))
    else:
        parent[last] = None


def _pretrained(node: Any, key: str) -> Iterator[tuple[str, ConfigDict]]:
    """Yield each `init_cfg=dict(type="Pretrained")` inside a part of a config, with its key."""
    if isinstance(node, dict):
        if "checkpoint" in node and class_of(node.get("type"), WEIGHT_INITIALIZERS) is PretrainedInit:
            yield key, node
        for name, child in node.items():
            yield from _pretrained(child, f"{key}.{name}")
    elif isinstance(node, (list, tuple)):
        for index, child in enumerate(node):
            yield from _pretrained(child, f"{key}.{index}")
