"""Randomness that a resumed training shares with an undisturbed one."""

import random

import numpy as np
import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.runner import Runner

from mapet_mm.registry import HOOKS


@HOOKS.register_module()
class EpochSeedHook(Hook):
    """Seed each epoch's draws from the run's seed, the iteration reached and the process.

    Without it a training resumed from a checkpoint draws other permutations, jitter and stochastic depth than
    one that ran through. With it, and images loaded in the main process (`num_workers=0`), the two end with
    the same weights bit for bit on a CPU; with workers, only what the workers draw differs.
    """

    def before_train_epoch(self, runner: Runner) -> None:
        """Seed Python, NumPy and PyTorch on all devices."""
        sequence = np.random.SeedSequence([runner.seed, runner.iter, get_rank()])
        seed = int(sequence.generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
