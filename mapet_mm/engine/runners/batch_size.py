"""Learning rates for the batch in use: MMEngine's scaling, with the gradients that are accumulated."""

from typing import Any

from mmengine.config import Config, ConfigDict

from mapet_mm.engine.runners.resume import LaunchError


def check_scaling(cfg: Config) -> None:
    """Raise LaunchError if `auto_scale_lr` is switched on and cannot be computed."""
    if not (cfg.get("auto_scale_lr") or {}).get("enable", False):
        return
    if "base_batch_size" not in cfg.auto_scale_lr:
        raise LaunchError("--auto-scale-lr: the config has no `auto_scale_lr = dict(base_batch_size=...)`")
    if "batch_size" not in cfg.train_dataloader:
        raise LaunchError("--auto-scale-lr: `train_dataloader` has no `batch_size` to scale to")
    _accumulated(cfg)


def scaling_with_accumulation(cfg: Config) -> ConfigDict | None:
    """`auto_scale_lr` for a runner of this config, which counts processes and their batches alone.

    A step over several accumulated batches is one over a larger batch. MMEngine scales the rate to
    processes x batch size; the base is divided by the number of accumulated batches, which comes to the same.
    """
    scaling = cfg.get("auto_scale_lr")
    if not scaling or not scaling.get("enable", False):
        return scaling
    return ConfigDict(scaling, base_batch_size=scaling.base_batch_size / _accumulated(cfg))


def describe_scaling(cfg: Config, processes: int) -> str:
    """What the rate is scaled to, in words."""
    batch, accumulated, base = (
        cfg.train_dataloader.batch_size,
        _accumulated(cfg),
        cfg.auto_scale_lr.base_batch_size,
    )
    total = processes * batch * accumulated
    return (
        f"learning rate x {total / base:g}: a step takes {total} images ({processes} processes x "
        f"batch {batch} x {accumulated} accumulated), the config's rate is meant for {base}"
    )


def _accumulated(cfg: Config) -> int:
    """How many batches make a step; there may be one optimizer wrapper or a dict of several."""
    parts = [part for part in cfg.optim_wrapper.values() if isinstance(part, dict) and "optimizer" in part]
    wrappers: list[dict[str, Any]] = parts or [cfg.optim_wrapper]
    counts = {wrapper.get("accumulative_counts", 1) for wrapper in wrappers}
    if len(counts) > 1:
        raise LaunchError(
            f"--auto-scale-lr: the optimizer wrappers accumulate different numbers of batches "
            f"({', '.join(map(str, sorted(counts)))}): set their learning rates in the config"
        )
    return counts.pop()
