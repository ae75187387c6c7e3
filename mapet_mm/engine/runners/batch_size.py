"""Learning rates for the batch in use: MMEngine's scaling, with the gradients that are accumulated."""

from mmengine.config import Config, ConfigDict

from mapet_mm.engine.runners.resume import LaunchError, say


def check_accumulation(cfg: Config) -> None:
    """Say, or refuse with `auto_scale_lr`, that a loop of iterations counts batches, not updates."""
    scaling, number = cfg.get("auto_scale_lr") or {}, accumulated(cfg)
    if number > 1 and (batches := cfg.train_cfg.get("max_iters")):
        line = (
            f"max_iters={batches} counts batches: with accumulative_counts={number} these are "
            f"{batches // number} updates, warm-up included. Set train_cfg.max_iters={batches * number}, and "
            f"val_interval and the `begin` and `end` of param_scheduler times {number}"
        )
        if scaling.get("enable"):
            raise LaunchError(f"--auto-scale-lr: {line}; then leave the option out")
        say(f"warning: {line}")
    if scaling.get("enable") and "base_batch_size" not in scaling:
        raise LaunchError("--auto-scale-lr: the config has no `auto_scale_lr = dict(base_batch_size=...)`")


def scaling_with_accumulation(cfg: Config) -> ConfigDict | None:
    """`auto_scale_lr` with the base per accumulated batch: MMEngine scales to processes x batch size."""
    scaling = cfg.get("auto_scale_lr")
    if not scaling or not scaling.get("enable"):
        return scaling
    return ConfigDict(scaling, base_batch_size=scaling.base_batch_size / accumulated(cfg))


def accumulated(cfg: Config) -> int:
    """Number of batches that make a step."""
    return (cfg.get("optim_wrapper") or {}).get("accumulative_counts", 1)
