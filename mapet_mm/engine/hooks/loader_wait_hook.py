"""Say when a training waits for its images."""

from __future__ import annotations

import time
from typing import Any

from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch.utils.data import Dataset

from mapet_mm.datasets.pipelines import find_step, leaf_datasets
from mapet_mm.datasets.stored_images import StoredImages
from mapet_mm.datasets.transforms.token_grid import LoadTokenGrid
from mapet_mm.registry import HOOKS

# What helps where images are decoded beside their tokens, and where stored squares are jittered one by one.
STORE = (
    ", or decode each image once: `mapet-mm store-images CONFIG`, then train with the `-stored` recipe "
    "(docs/feeding_the_gpu.md)"
)
JITTER = ", or jitter colours on the GPU, as the `-stored` recipes do (docs/feeding_the_gpu.md)"


@HOOKS.register_module()
class LoaderWaitHook(Hook):
    """Log one line, once, if steps wait for images for more than a share of the last minute.

    The model then trains more slowly than it could. The first step of an epoch, which waits for the loader
    to start, does not count, nor does what hooks do between steps. Nothing is read from the device.

    Args:
        share: of the time, from 0 to 1, that steps may wait without a word.
        seconds: length of the time that is looked at.
    """

    # The last to see a step's end: MMEngine's `data_time` also counts the checkpoints saved between steps.
    priority = "LOWEST"

    def __init__(self, share: float = 0.2, seconds: float = 60.0) -> None:
        self.share = share
        self.seconds = seconds
        self.is_said = False
        self.waited = self.worked = 0.0

    def before_train_iter(self, runner: Runner, batch_idx: int, *_: Any, **__: Any) -> None:
        """Count the time since the last step as waiting."""
        self.begin = time.monotonic()
        if batch_idx:
            self.waited += self.begin - self.end

    def after_train_iter(self, runner: Runner, *_: Any, **__: Any) -> None:
        """Count the step's time; at the end of each minute, compare."""
        self.end = time.monotonic()
        self.worked += self.end - self.begin
        total = self.waited + self.worked
        if self.is_said or total < self.seconds:
            return
        share = self.waited / total
        if share > self.share:
            self.is_said = True
            runner.logger.warning(f"{100 * share:.0f} % of the last {total:.0f} s {cure(runner)}")
        self.waited = self.worked = 0.0


def cure(runner: Runner) -> str:
    """The rest of the line: what the steps waited for, and what to do."""
    loader = runner.train_dataloader
    line = (
        "went by in waiting for images, the model could train faster: raise `train_dataloader.num_workers` "
        f"(now {loader.num_workers} for each process) while the machine has free cores"
    )
    leaves = list(leaf_datasets(loader.dataset))
    if any(isinstance(leaf, StoredImages) and not leaf.gives_whole_batches for leaf in leaves):
        line += JITTER
    if any(decodes_beside_tokens(leaf) for leaf in leaves):
        line += STORE
    return line


def decodes_beside_tokens(dataset: Dataset) -> bool:
    """True if a dataset decodes images beside stored tokens, so that squares could be stored, too."""
    if isinstance(dataset, StoredImages):
        return False
    return find_step(getattr(dataset, "pipeline", None), LoadTokenGrid) is not None
