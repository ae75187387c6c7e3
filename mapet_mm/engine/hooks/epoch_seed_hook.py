"""A training's random draws as a function of where it stands, so that it can be resumed anywhere."""

import random

import numpy as np
import torch
from mmengine.dist import broadcast_object_list, get_rank
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.runner import EpochBasedTrainLoop, Runner

from mapet_mm.datasets.samplers import SeededSampler
from mapet_mm.registry import HOOKS
from mapet_mm.utils.errors import UserError

LENGTH = "steps_per_epoch"  # in a checkpoint's `meta`


class ResumeError(UserError):
    """A checkpoint from which this run cannot go on exactly; the message says with what it could."""


@HOOKS.register_module()
class EpochSeedHook(Hook):
    """Seed the random draws of each image and each step, and resume within an epoch.

    `mapet_mm.datasets.seed_dataloaders`, which `tools/train.py` calls before it builds the Runner, gives each
    image a seed made of the run's seed, the epoch and the image's place in the epoch's order. What the model
    draws in a step, for example stochastic depth, comes from the seed, the step and the process. A run that
    was killed and resumed, also in the middle of an epoch, therefore ends with the same weights as an
    undisturbed one, with any number of workers: bit for bit on CPUs of one type, and on CUDA only with
    `randomness=dict(deterministic=True)`. The exceptions: gradients that were being accumulated at the
    checkpoint are lost, and a batch sampler of the config's own (as MMDetection's by aspect ratio) groups the
    rest of the epoch anew. Another number of processes draws the same if `processes x batch_size` is the
    same, but for images that MMEngine repeats at an epoch's end.

    Raises:
        ResumeError: the checkpoint's epochs had another number of steps.
    """

    def __init__(self) -> None:
        self.length_before: int | None = None

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Note how long the checkpoint's epochs were."""
        self.length_before = checkpoint.get("meta", {}).get(LENGTH)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Write down how long an epoch is."""
        checkpoint["meta"][LENGTH] = len(runner.train_dataloader)

    def before_train(self, runner: Runner) -> None:
        """Give the sampler the run's seed, and the place where a resumed epoch begins."""
        seeds = [runner.seed]
        broadcast_object_list(seeds)  # MMEngine adds the process's number
        self.seed = seeds[0]
        loader = runner.train_dataloader
        sampler = getattr(loader.batch_sampler, "sampler", None)
        if not isinstance(sampler, SeededSampler):
            MMLogger.get_current_instance().warning(
                "EpochSeedHook: images draw without seeds of their own, and a resumed run will differ: call "
                "mapet_mm.datasets.seed_dataloaders(cfg) before the Runner is built"
            )
            return
        if sampler.seed != self.seed:
            sampler.reseed(self.seed)
            # MMEngine 0.10.7 started the loader of a loop of iterations before it read the checkpoint.
            if begun := getattr(runner.train_loop, "dataloader_iterator", None):
                runner.train_loop.dataloader_iterator = type(begun)(loader)
        if isinstance(runner.train_loop, EpochBasedTrainLoop) and runner.iter:  # resumed
            length = len(loader)
            if self.length_before not in (None, length):
                raise ResumeError(
                    f"the checkpoint's epochs have {self.length_before} steps, this run's have {length}: set "
                    "`train_dataloader.batch_size` so that processes x batch_size is what it was"
                )
            sampler.start = (runner.iter - runner.epoch * length) * loader.batch_sampler.batch_size

    def before_train_iter(self, runner: Runner, *args: object, **kwargs: object) -> None:
        """Seed what the step draws: Python, NumPy and PyTorch on all devices."""
        seed = int(np.random.SeedSequence([self.seed, runner.iter, get_rank()]).generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
