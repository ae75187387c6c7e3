"""One line when a run's total batch is another one than its learning rate is meant for."""

from __future__ import annotations

from mmengine.dist import get_world_size
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.runner import Runner

from mapet_mm.engine.runners.batch_size import accumulated
from mapet_mm.registry import HOOKS


@HOOKS.register_module()
class TotalBatchHook(Hook):
    """Log one line if the images per step differ from the config's `auto_scale_lr.base_batch_size`.

    Nothing is logged if `--auto-scale-lr` has already scaled the rate.
    """

    def before_train(self, runner: Runner) -> None:
        """Compare processes x images per process x accumulated batches with what the rate is meant for."""
        scaling = runner.cfg.get("auto_scale_lr") or {}
        meant, batch = scaling.get("base_batch_size"), runner.train_dataloader.batch_size
        if meant is None or batch is None or scaling.get("enable"):
            return
        processes, batches = get_world_size(), accumulated(runner.cfg)
        if (total := processes * batch * batches) != meant:
            MMLogger.get_current_instance().warning(
                f"the learning rate is meant for a total batch of {meant}, this run's is {total} "
                f"({processes} processes x {batch} images x {batches} accumulated): add --auto-scale-lr, or "
                "set `optim_wrapper.optimizer.lr`"
            )
