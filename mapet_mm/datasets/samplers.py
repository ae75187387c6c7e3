"""A loader's random draws depend only on (seed, epoch, image); and images that cannot be read."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from mmcv.transforms import LoadImageFromFile
from mmengine.dist import get_dist_info
from mmengine.logging import print_log
from mmengine.structures import BaseDataElement
from torch.utils.data import Dataset

from mapet_mm.tokenizers.images import check_on_error
from mapet_mm.utils.errors import UserError, reason_of

# Name of an image's seed in its data sample.
DRAW_SEED = "draw_seed"
# This many unreadable images in a row point to another cause than the images.
ATTEMPTS = 10


class UnreadableImageError(UserError):
    """An image of the training set cannot be read; the message names it."""


class SeededIndex(int):
    """An image's index in its dataset that carries the seed of its draws to the worker that loads it."""

    seed: int

    def __new__(cls, index: int, seed: int) -> SeededIndex:
        self = super().__new__(cls, index)
        self.seed = seed
        return self

    def __reduce__(self) -> tuple:
        return SeededIndex, (int(self), self.seed)


class SeededBatches:
    """A loader's batch sampler whose indices carry seeds, and which can start in the middle of an epoch.

    An image's seed depends on the run's seed, the epoch and the image's place in the epoch's order over all
    processes, so it does not depend on the number of workers, or of processes with the same total batch. With
    repeated augmentation, each copy of an image gets a different seed.

    Args:
        batches: the batch sampler; other attributes are looked up in it.
        seed: of the run, the same in all processes.

    Attributes:
        epoch: the epoch that is drawn next; increases by one with each.
        start: number of its batches to leave out.
        passed: number of images that the sampler itself has left out already, in this process.
    """

    def __init__(self, batches: Any, seed: int) -> None:
        self.batches, self.seed = batches, seed
        self.epoch = self.start = self.passed = 0
        self.rank, self.world_size = get_dist_info()

    def __getattr__(self, name: str) -> Any:
        if name == "batches":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[SeededIndex]]:
        start, place = self.start, self.passed
        self.start = self.passed = 0
        for number, batch in enumerate(self.batches):
            if number >= start:
                places = np.arange(place, place + len(batch)) * self.world_size + self.rank
                yield list(map(SeededIndex, batch, draw_seeds(self.seed, self.epoch, places)))
            place += len(batch)
        self.epoch += 1


class SeededDataset(Dataset):
    """A dataset that seeds Python, NumPy and PyTorch from each index, and otherwise behaves as the inner
    one.

    A sample's seed is kept in the metainfo of its data sample, as `draw_seed`: MaPeT draws the image's
    permutation with it.

    Args:
        dataset: the dataset.
        on_error: for images that cannot be read: 'raise', or 'skip' to take the dataset's next image with a
            warning. Other errors in the pipeline are raised unchanged.

    Raises:
        UnreadableImageError: an image cannot be read, or with 'skip' many images in a row.
    """

    def __init__(self, dataset: Dataset, on_error: str = "raise") -> None:
        check_on_error(on_error)
        self.__dict__.update(dataset=dataset, on_error=on_error)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # during unpickling, or looked up by a loader
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        seed = getattr(index, "seed", None)
        for attempt in range(ATTEMPTS if self.on_error == "skip" else 1):
            try:
                return self._load((int(index) + attempt) % len(self), seed)
            except Exception as error:
                path = _unreadable(error)
                if path is None:
                    raise
                reason = reason_of(error)
                print_log(f"image `{path}` cannot be read ({reason})", "current", logging.WARNING)
        raise UnreadableImageError(
            f"image `{path}` cannot be read ({reason}): repair it, or have the next one taken in its place "
            "with --cfg-options default_hooks.epoch_seed.on_error=skip"
        )

    def _load(self, index: int, seed: int | None) -> Any:
        if seed is None:
            return self.dataset[index]
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)  # a loader draws on the CPU only
        sample = self.dataset[index]
        data_sample = sample.get("data_samples") if isinstance(sample, dict) else None
        if isinstance(data_sample, BaseDataElement):
            data_sample.set_metainfo({DRAW_SEED: seed})
        return sample


def _unreadable(error: Exception) -> str | None:
    """Path of the image that could not be loaded; None for any other error."""
    trace = error.__traceback__
    while trace is not None:
        names = trace.tb_frame.f_locals
        if isinstance(names.get("self"), LoadImageFromFile) and isinstance(names.get("results"), dict):
            return names["results"].get("img_path")
        trace = trace.tb_next
    return None


def draw_seeds(seed: int, epoch: int, places: Int64[np.ndarray, " place"]) -> list[int]:
    """A number below 2^63 for each place in an epoch's order (SplitMix64, one generator per epoch)."""
    state = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)
    mixed = state + (places.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(1)).tolist()
