"""A training's randomness as a function of where it stands, so that one can be resumed anywhere."""

import random
from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
from mmengine.dist import broadcast_object_list, get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.runner import EpochBasedTrainLoop, Runner

from mapet_mm.datasets.samplers import SeededBatches, SeededDataset
from mapet_mm.registry import HOOKS
from mapet_mm.tokenizers.images import check_on_error
from mapet_mm.utils.dist import unwrapped
from mapet_mm.utils.errors import UserError

LENGTH = "steps_per_epoch"  # of the training that wrote a checkpoint, in its metainfo


class ResumeError(UserError):
    """A checkpoint from which this run cannot go on exactly; the message says with what it could."""


@HOOKS.register_module()
class EpochSeedHook(Hook):
    """Seed the random draws of each image and each step, and resume within an epoch.

    The order of the images comes from the run's seed and the epoch; a `seed` of the config's
    `train_dataloader.sampler` takes the place of the run's there. An image's augmentations, masks and
    permutation come from the run's seed, the epoch and the image (see `mapet_mm.datasets.samplers`). What the
    model draws in a step, for example stochastic depth, comes from the seed, the step and the process. A run
    that was killed and resumed from a checkpoint, even in the middle of an epoch or of gradient accumulation,
    therefore ends with the same weights as an undisturbed one, bit for bit on one machine type, with any
    number of workers. The exceptions: gradients accumulated by several optimizers (`OptimWrapperDict`), and
    in an epoch at whose beginning a hook switched the pipeline (`SwitchRecipeHook`), are not resumed exactly,
    and neither are batch statistics if the step that the checkpoint stands in is left out (`NonFiniteHook`).

    Another number of processes sees the same images in each step with the same draws if `processes x
    batch_size` is the same. Where the number of images is no multiple of the processes, an epoch's last step
    differs: MMEngine's sampler repeats up to `processes - 1` images there. Sums over a step differ in their
    last bits, and stochastic depth is drawn per process.

    Args:
        on_error: for training images that cannot be read, see `mapet_mm.datasets.samplers.SeededDataset`.

    Raises:
        ResumeError: the checkpoint is from the middle of an epoch that had another number of steps.
    """

    def __init__(self, on_error: str = "raise") -> None:
        check_on_error(on_error)
        self.on_error = on_error

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Check that an epoch has as many steps as it had, or stands at its end."""
        count_in_epochs(runner, checkpoint)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Note the number of steps of an epoch."""
        note_epoch_length(runner, checkpoint)

    def before_train(self, runner: Runner) -> None:
        """Have the loader's draws seeded, and note what the checkpoint leaves out: summed gradients."""
        seeds = [runner.seed]
        broadcast_object_list(seeds)  # MMEngine adds the process's number
        self.seed = seeds[0]
        loader = runner.train_dataloader
        if loader.batch_sampler is None:
            MMLogger.get_current_instance().warning(
                "EpochSeedHook: the training set makes its own batches, whose draws it cannot seed: a "
                "resumed run will differ from an undisturbed one"
            )
            return
        # A loader refuses another dataset or sampler because their lengths could differ; here they do not.
        object.__setattr__(loader, "dataset", SeededDataset(loader.dataset, self.on_error))
        object.__setattr__(loader, "batch_sampler", SeededBatches(loader.batch_sampler, self.seed))
        sampler_cfg = (runner.cfg.get("train_dataloader") or {}).get("sampler") or {}
        for sampler in {id(one): one for one in (loader.sampler, loader.batch_sampler.sampler)}.values():
            if hasattr(sampler, "seed") and sampler_cfg.get("seed") is None:
                sampler.seed = self.seed  # the checkpoint's, where the config has none
        self.lost = runner.iter % getattr(runner.optim_wrapper, "_accumulative_counts", 1)

    def before_train_epoch(self, runner: Runner) -> None:
        """Begin where the run stands, with the draws of this epoch."""
        loader = runner.train_dataloader
        if not isinstance(loader.batch_sampler, SeededBatches):
            return
        if self.lost:
            self._accumulate_again(runner)
        by_epoch = isinstance(runner.train_loop, EpochBasedTrainLoop)
        # MMEngine's other loop goes through all batches again, unless the loader's sampler can skip.
        self._place(runner, runner.iter if by_epoch or hasattr(loader.sampler, "skip") else 0)

    def before_train_iter(self, runner: Runner, *args: object, **kwargs: object) -> None:
        """Seed what the step draws: Python, NumPy and PyTorch on all devices."""
        self._seed_step(runner.iter)

    def _seed_step(self, step: int) -> None:
        sequence = np.random.SeedSequence([self.seed, step, get_rank()])
        seed = int(sequence.generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def _place(self, runner: Runner, step: int) -> None:
        """Let the loader begin with the batch of a step."""
        loader, by_epoch = runner.train_dataloader, isinstance(runner.train_loop, EpochBasedTrainLoop)
        batches = loader.batch_sampler
        samplers = (loader.sampler, batches.sampler)
        batches.epoch, batches.start, batches.passed = 0, step, 0
        endless = None if by_epoch else next((one for one in samplers if hasattr(one, "skip")), None)
        if endless is None:
            # At the very end of an epoch, its hooks and its validation may still be due.
            batches.epoch = min(step // len(loader), runner.epoch) if by_epoch else step // len(loader)
            batches.start = step - batches.epoch * len(loader)
            for sampler in samplers:
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(batches.epoch)
            return
        if endless is loader.sampler:
            batches.start, batches.passed = 0, step * loader.batch_size
        endless.skip(batches.passed)

    def _accumulate_again(self, runner: Runner) -> None:
        """Back-propagate the batches whose gradients were summed up, and not used yet, at the checkpoint.

        Not before other hooks' `before_train`: they compile the model, or bring its data's recipe up to date.
        """
        wrapper, lost = runner.optim_wrapper, self.lost
        self.lost = 0
        model = unwrapped(runner.model)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        wrapper._inner_count -= lost
        runner.model.train()
        for step, batch in self._batches(runner, runner.iter - lost, runner.iter):
            self._seed_step(step)
            runner.model.train_step(batch, optim_wrapper=wrapper)
        with torch.no_grad():  # statistics and averages had seen these batches
            for name, value in model.state_dict().items():
                value.copy_(state[name])

    def _batches(self, runner: Runner, first: int, end: int) -> Iterator[tuple[int, dict]]:
        """The batches of steps that were done before, with their numbers."""
        while first < end:  # an epoch at a time
            self._place(runner, first)
            for batch in islice(runner.train_dataloader, end - first):
                yield first, batch
                first += 1


def note_epoch_length(runner: Runner, checkpoint: dict) -> None:
    """Write into a checkpoint how many steps an epoch has."""
    checkpoint["meta"][LENGTH] = len(runner.train_dataloader)


def count_in_epochs(runner: Runner, checkpoint: dict) -> None:
    """Count the steps of a checkpoint to resume from as if its epochs had been as long as this run's.

    Raises:
        ResumeError: it is from the middle of an epoch that had another number of steps.
    """
    if not runner._resume or not isinstance(runner.train_loop, EpochBasedTrainLoop):
        return
    meta, length = checkpoint.get("meta", {}), len(runner.train_dataloader)
    before = meta.get(LENGTH, length)
    if before == length:
        return
    processes, batch = get_world_size(), runner.train_dataloader.batch_size
    steps = meta["iter"] - meta["epoch"] * before
    if 0 < steps < before:
        raise ResumeError(
            f"the checkpoint stands {steps} steps into an epoch of {before}, this run's have {length} ("
            f"{processes} processes x {batch} images a step): set `train_dataloader.batch_size` so that "
            "they have as many, or resume from the end of an epoch"
        )
    meta["iter"], meta[LENGTH] = (meta["epoch"] + bool(steps)) * length, length
    MMLogger.get_current_instance().warning(
        f"the checkpoint's epochs have {before} steps, this run's {length} ({processes} processes x "
        f"{batch} images a step): it goes on after step {meta['iter']}"
    )
