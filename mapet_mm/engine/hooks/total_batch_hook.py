"""Scale the learning rate to the total batch, counting accumulated batches (MMEngine does not), or refuse."""

from __future__ import annotations

from mmengine.config import Config, ConfigDict
from mmengine.dist import get_world_size
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.runner import Runner

from mapet_mm.registry import HOOKS
from mapet_mm.utils.dist import print_to_user
from mapet_mm.utils.errors import LaunchError


@HOOKS.register_module()
class TotalBatchHook(Hook):
    """Refuse to start if the images per step differ from the config's `auto_scale_lr.base_batch_size`.

    They may differ if `--auto-scale-lr` has scaled the rate, or if the config says `auto_scale_lr = None`,
    because its rate is meant as it is. A training that is under way goes on with a warning.

    Raises:
        LaunchError: the rate is meant for another number of images per step; or an epoch has no step,
            because `drop_last` leaves its only batch out.
    """

    def before_train(self, runner: Runner) -> None:
        """Compare processes x images per process x accumulated batches with what the rate is meant for."""
        require_steps(runner)
        scaling = runner.cfg.get("auto_scale_lr") or {}
        base = scaling.get("base_batch_size")
        batch = runner.train_dataloader.batch_size
        if base is None or batch is None or scaling.get("enable"):
            return
        processes = get_world_size()
        counts = accumulated(runner.cfg)
        total = processes * batch * counts
        if total == base:
            return
        line = (
            f"the learning rate is meant for a total batch of {base}, this run's is {total} "
            f"({processes} processes x {batch} images x {counts} accumulated): change one of these, or add "
            "--auto-scale-lr, or --cfg-options auto_scale_lr=None if the rate is meant for it"
        )
        if runner.iter == 0:
            raise LaunchError(line)
        MMLogger.get_current_instance().warning(line)


def require_steps(runner: Runner) -> None:
    """Raise LaunchError if all images together make no whole batch: the training would do nothing."""
    loader = runner.train_dataloader
    if getattr(loader, "drop_last", False) and len(loader) == 0:
        raise LaunchError(
            f"the training set has {len(loader.dataset)} images, no batch of {loader.batch_size} for "
            "each process: set a smaller train_dataloader.batch_size, or train_dataloader.drop_last=False"
        )


def check_accumulation(cfg: Config) -> None:
    """Say, or refuse with `auto_scale_lr`, that a loop of iterations counts batches, not updates."""
    scaling = cfg.get("auto_scale_lr") or {}
    counts = accumulated(cfg)
    batches = cfg.train_cfg.get("max_iters")
    if counts > 1 and batches:
        line = (
            f"max_iters={batches} counts batches: with accumulative_counts={counts} these are "
            f"{batches // counts} updates, warm-up included. Set train_cfg.max_iters={batches * counts}, and "
            f"val_interval and the `begin` and `end` of param_scheduler times {counts}"
        )
        if scaling.get("enable"):
            raise LaunchError(f"--auto-scale-lr: {line}; then leave the option out")
        print_to_user(f"warning: {line}")
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
