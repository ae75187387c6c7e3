"""Seed every random draw from the step and the image, so that a run can resume at any step."""

import random
from collections.abc import Mapping

import numpy as np
import torch
from mmengine.dist import broadcast_object_list, get_rank
from mmengine.hooks import Hook
from mmengine.runner import EpochBasedTrainLoop, Runner

from mapet_mm.datasets.samplers import seeded_loader
from mapet_mm.registry import HOOKS
from mapet_mm.utils.errors import UserError

STEPS_PER_EPOCH_KEY = "steps_per_epoch"  # in a checkpoint's `meta`


class ResumeError(UserError):
    """A checkpoint from which this run cannot go on exactly; the message says with what it could."""


@HOOKS.register_module()
class EpochSeedHook(Hook):
    """Seed the random draws of each image and each step, and resume within an epoch.

    Each image has a seed made of the run's seed, the epoch and the image's position in the epoch's order.
    What the model draws in a step, for example stochastic depth, comes from the seed, the step and the
    process. A run that was killed and resumed, also in the middle of an epoch, therefore ends with the same
    weights as an undisturbed one: bit for bit on the CPUs of one machine type, and on GPUs with
    `randomness=dict(deterministic=True)`, with any number of workers.

    The hook does all of this itself, wherever a config lists it: before training it exchanges the loader for
    one that seeds. The exceptions: gradients that were being accumulated at the checkpoint are lost, and a
    batch sampler of the config's own (as MMDetection's by aspect ratio) groups the rest of the epoch anew.
    Another number of processes draws the same if `processes x batch_size` is the same, but for images that
    MMEngine repeats at an epoch's end.

    Raises:
        ResumeError: the checkpoint's epochs had another number of steps, or the run's loader is not from a
            config.
    """

    def __init__(self) -> None:
        self.length_before: int | None = None

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Note how long the checkpoint's epochs were."""
        self.length_before = checkpoint.get("meta", {}).get(STEPS_PER_EPOCH_KEY)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Write down how long an epoch is."""
        checkpoint["meta"][STEPS_PER_EPOCH_KEY] = len(runner.train_dataloader)

    def before_train(self, runner: Runner) -> None:
        """Exchange the loader for one that seeds, and start it where a resumed epoch begins."""
        seeds = [runner.seed]
        broadcast_object_list(seeds)  # MMEngine adds the process's number
        self.seed = seeds[0]
        config = runner.cfg.get("train_dataloader")
        if not isinstance(config, Mapping):
            raise ResumeError(
                "EpochSeedHook needs `train_dataloader` as a config, not a loader that is built"
            )
        loop = runner.train_loop
        loop.dataloader = seeded_loader(loop.dataloader, config["sampler"], self.seed)
        if hasattr(loop, "dataloader_iterator"):  # of a loop of iterations
            loop.dataloader_iterator = type(loop.dataloader_iterator)(loop.dataloader)
        if isinstance(loop, EpochBasedTrainLoop) and runner.iter:  # resumed
            self._start_within_epoch(runner)

    def _start_within_epoch(self, runner: Runner) -> None:
        batches = runner.train_dataloader.batch_sampler
        length = len(runner.train_dataloader)
        if self.length_before not in (None, length):
            raise ResumeError(
                f"the checkpoint's epochs have {self.length_before} steps, this run's have {length}: set "
                "`train_dataloader.batch_size` so that processes x batch_size is what it was"
            )
        steps = runner.iter - runner.epoch * length
        batches.sampler.start = steps * batches.batch_size

    def before_train_iter(self, runner: Runner, *args: object, **kwargs: object) -> None:
        """Seed what the step draws: Python, NumPy and PyTorch on all devices."""
        seed = int(np.random.SeedSequence([self.seed, runner.iter, get_rank()]).generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
