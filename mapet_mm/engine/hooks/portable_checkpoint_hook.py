"""Checkpoints that say what they are, fit their model, and resume in another folder."""

import warnings
from pathlib import Path
from typing import Any

from mmengine.runner import Runner

from mapet_mm.engine.hooks.whole_checkpoint_hook import WholeCheckpointHook
from mapet_mm.engine.runners.resume import check_weights
from mapet_mm.interop.description import description_entry
from mapet_mm.interop.record import NUM_IMAGES
from mapet_mm.registry import HOOKS
from mapet_mm.utils.dist import unwrapped

# Entries of a config that decide the rates.
RATE_KEYS = ("param_scheduler", "optim_wrapper", "auto_scale_lr")


@HOOKS.register_module()
class PortableCheckpointHook(WholeCheckpointHook):
    """Write whole checkpoints of tensors and plain values, and refuse weights that fit no layer.

    Each has a description of the network and the number of training images for exports. In a copied work dir,
    `best_ckpt` points into the copy. After a change of schedule, training continues at the new schedule's
    rate for the current step.

    Args:
        recipe: digests of the run's config, kept in each checkpoint; `mapet-mm train` passes them.
    """

    def __init__(self, recipe: dict[str, Any] | None = None) -> None:
        self.recipe = recipe
        self.has_new_rates = False

    def before_train(self, runner: Runner) -> None:
        """Have whole files written, and bring new schedules to a resumed run's step."""
        super().before_train(runner)
        if self.has_new_rates and runner.iter:
            replay_schedules(runner)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Add what exports describe and the config's digests; leave tensors and plain values."""
        if "meta" in checkpoint:
            checkpoint["meta"].update(description_entry(runner.cfg))
            if self.recipe:
                checkpoint["meta"]["recipe"] = self.recipe
            checkpoint["meta"][NUM_IMAGES] = len(runner.train_dataloader.dataset)
        super().before_save_checkpoint(runner, checkpoint)

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Check the weights' names, and take the run's own best checkpoint, and its own schedules.

        Raises:
            UserError: no weight has the name of one of the model's: MMEngine would only warn.
        """
        meta = checkpoint.get("meta", {})
        # MMEngine runs this text as a config when it resumes; it writes none itself.
        meta.pop("config", None)
        check_weights(unwrapped(runner.model), checkpoint)
        before = meta.get("recipe")
        if before and self.recipe:
            self.has_new_rates = any(before.get(key) != self.recipe.get(key) for key in RATE_KEYS)
        if self.has_new_rates:  # MMEngine loads nothing into its new schedules
            checkpoint["param_schedulers"] = [{} for _ in checkpoint.get("param_schedulers") or ()]
        information = checkpoint.get("message_hub", {}).get("runtime_info", {})
        point_best_checkpoints_to(Path(runner.work_dir), information)


def point_best_checkpoints_to(work_dir: Path, information: dict) -> None:
    """Let MMEngine's records of the best checkpoints name this folder's files, where it has them."""
    for name, recorded in list(information.items()):
        if name.startswith("best_ckpt") and recorded:
            own = work_dir / Path(recorded).name
            if own.is_file():
                information[name] = str(own)


def replay_schedules(runner: Runner) -> None:
    """Bring new schedules, and the rates with them, to the step that a resumed run stands at."""
    for scheduler in runner.param_schedulers or ():
        for group, value in zip(scheduler.optimizer.param_groups, scheduler.get_last_value(), strict=True):
            group[scheduler.param_name] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer makes no step meanwhile
        for scheduler in runner.param_schedulers or ():
            for _ in range(runner.epoch if scheduler.by_epoch else runner.iter):
                scheduler.step()
