"""The recipe of a training, as digests: by those in a checkpoint it is known to be of the same training."""

import os
import shlex
from pathlib import Path

from mmengine.config import Config

from mapet_mm.engine.runners.resume import read
from mapet_mm.utils.config import nodes
from mapet_mm.utils.errors import LaunchError
from mapet_mm.utils.identity import digest, digest_of_file

# Entries that may differ between two starts of one training: where it runs, how much it logs.
RUN_ONLY_KEYS = {"resume", "launcher", "work_dir", "model_wrapper_cfg", "env_cfg"}
RUN_ONLY_KEYS |= {"default_hooks", "log_level", "log_processor", "visualizer", "vis_backends"}
LOADER_KEYS = ("num_workers", "persistent_workers", "pin_memory", "timeout")


def config_digests(cfg: Config) -> dict[str, str]:
    """Digests of a training: of each entry of its config, and of each file that its model starts from."""
    entries = {key: value for key, value in cfg.to_dict().items() if key not in RUN_ONLY_KEYS}
    for name, entry in entries.items():
        if name.endswith("_dataloader") and entry:
            entries[name] = {key: value for key, value in entry.items() if key not in LOADER_KEYS}
    if cfg.get("resume"):  # `load_from` is where it resumes
        entries.pop("load_from", None)
    preprocessor = entries.get("data_preprocessor") or {}
    if preprocessor.get("type") == "mapet_mm.ClsDataPreprocessor":  # as good as none: MMPretrain's default
        entries["data_preprocessor"] = {key: value for key, value in preprocessor.items() if key != "type"}
    for _, value in nodes([entries.get("model"), entries.get("load_from")]):
        if isinstance(value, str) and os.path.isfile(value):
            file = value.replace("'", '"')  # MMEngine cannot write a key with an apostrophe into a log
            entries[f"content of {file}"] = digest_of_file(value)
    return {name: digest(value)[:12] for name, value in sorted(entries.items())}


def recorded_digests(checkpoint: str, trust: bool = False) -> dict[str, str] | None:
    """The digests of the training that wrote a checkpoint; None if MMEngine alone did.

    Raises:
        LaunchError: it has weights alone, without the epoch of a training.
    """
    content = read(Path(checkpoint).expanduser(), trust)
    meta = content.get("meta") or {}
    if "epoch" not in meta:
        option = f"--cfg-options load_from={shlex.quote(checkpoint)}"
        raise LaunchError(f"{checkpoint} has no training that could go on: {option} starts from its weights")
    return meta.get("recipe")


def digest_but_for_fused(cfg: Config, before: dict[str, str] | None) -> dict[str, str]:
    """A checkpoint's digest of `optim_wrapper`, if it is this config's with another `fused`; else nothing.

    The optimizer is the same whichever kernel computes it, on a GPU or on a CPU.
    """
    recorded = (before or {}).get("optim_wrapper")
    wrapper = cfg.optim_wrapper.to_dict()
    optimizer = dict(wrapper.get("optimizer") or {})
    optimizer.pop("fused", None)
    for option in ({}, dict(fused=True), dict(fused=False)):
        if recorded == digest({**wrapper, "optimizer": {**optimizer, **option}})[:12]:
            return dict(optim_wrapper=recorded)
    return {}


def differences(current: dict[str, str], before: dict[str, str] | None) -> list[str]:
    """Names of the entries in which a training differs from a checkpoint's; none if that has no digests."""
    if before is None:
        return []
    nothing = digest(None)[:12]  # an entry that says None is as good as none
    return [
        name
        for name in sorted(before.keys() | current.keys())
        if before.get(name, nothing) != current.get(name, nothing)
    ]
