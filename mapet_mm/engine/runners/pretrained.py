"""Weights that parts of a model start from: `init_cfg=dict(type="Pretrained", checkpoint=...)`."""

from mmengine.config import Config

from mapet_mm.engine.runners.resume import LaunchError, require_checkpoint
from mapet_mm.utils.config import pretrained_entries


def check_pretrained(cfg: Config, trust: bool) -> None:
    """Check that each `init_cfg=dict(type="Pretrained")` names a file, unless `load_from` brings the weights.

    Raises:
        LaunchError: one leaves it open, or the file is not there.
    """
    for key, init_cfg in reversed(list(pretrained_entries(cfg.model, "model"))):
        if isinstance(init_cfg.checkpoint, list):
            raise LaunchError(
                f"`{key}.checkpoint` is the list {list(init_cfg.checkpoint)}: put a path with a comma into "
                f"quotes, --cfg-options {key}.checkpoint=\"'A,B.pth'\""
            )
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
