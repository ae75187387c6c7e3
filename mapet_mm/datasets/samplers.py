"""Seeds for the random draws of each image, an order that starts anywhere, and errors that name an image."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from mmengine.dist import get_dist_info
from mmengine.registry import DATA_SAMPLERS as ALL_SAMPLERS
from mmengine.structures import BaseDataElement
from torch.utils.data import DataLoader, Dataset, Sampler

from mapet_mm.datasets.reading import is_of_storage, read_patiently, storage_message
from mapet_mm.utils.errors import UserError, reason_of
from mapet_mm.utils.splitmix import DRAW_SEED, splitmix

REMEDY = (
    "repair or remove it, leave unreadable images out by ignore_empty=True in the pipeline's "
    "LoadImageFromFile, or correct the pipeline (MAPET_MM_TRACEBACK=1 shows where)"
)
# What a loader keeps beside its dataset, its order and its batches.
LOADER_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


class PipelineError(UserError):
    """An error while an image of the training set is loaded; the message names the image."""


class SeededIndex(int):
    """An image's index in its dataset that carries the seed of its draws to the worker that loads it."""

    seed: int

    def __new__(cls, index: int, seed: int) -> SeededIndex:
        self = super().__new__(cls, index)
        self.seed = seed
        return self

    def __reduce__(self) -> tuple:
        return SeededIndex, (int(self), self.seed)


class SeededSampler(Sampler):
    """The order of another sampler, in which each index carries a seed, and which starts at any image.

    An image's seed depends on the run's seed, the epoch and the image's place in the epoch's order over all
    processes, so not on the number of workers, nor of processes with the same total batch.

    Args:
        sampler: orders the images.
        seed: of the run, the same in all processes.

    Attributes:
        start: images of this process to leave out when the next epoch begins.
    """

    def __init__(self, sampler: Sampler, seed: int) -> None:
        self.sampler = sampler
        self.seed = seed
        self.rank, self.world_size = get_dist_info()
        self.epoch = 0
        self.start = 0
        self.skipped = 0  # by MMEngine, of the same epoch
        # MMEngine calls `skip` if a sampler has it, else draws and drops batches.
        if hasattr(sampler, "skip"):
            self.skip = self._skip

    @property
    def dataset(self) -> Dataset:
        """The sampler's dataset, at whose images MMDetection's batch samplers look."""
        return self.sampler.dataset

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that is drawn next."""
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def _skip(self, images: int) -> None:
        self.sampler.skip(images)
        self.skipped = images

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[SeededIndex]:
        start = self.start
        first = self.skipped + start
        # For this epoch alone: the next one begins with its first image.
        self.start = 0
        self.skipped = 0
        state = epoch_state(self.seed, self.epoch)
        for number, index in enumerate(islice(self.sampler, start, None), first):
            position = number * self.world_size + self.rank  # in the order over all processes
            yield SeededIndex(index, draw_seed(state, position))


def seeded_loader(loader: DataLoader, sampler: Mapping[str, Any], seed: int) -> DataLoader:
    """A loader like this one, whose images draw by seeds and whose order starts anywhere.

    Args:
        loader: not iterated yet.
        sampler: config of its sampler, which orders the images by a `seed` of its own or the run's.
        seed: of the run, the same in all processes.
    """
    order = ALL_SAMPLERS.build(sampler, default_args=dict(dataset=loader.dataset, seed=seed))
    order = SeededSampler(order, seed)
    if loader.batch_size is None:  # a batch sampler of the config's own, such as MMDetection's by shape
        loader.batch_sampler.sampler = order
        batches = dict(batch_sampler=loader.batch_sampler)
    else:
        batches = dict(batch_size=loader.batch_size, drop_last=loader.drop_last, sampler=order)
    options = {name: getattr(loader, name) for name in LOADER_OPTIONS}
    return DataLoader(SeededDataset(loader.dataset), **batches, **options)


def epoch_state(seed: int, epoch: int) -> int:
    """First of an epoch's seeds."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0])


def draw_seed(state: int, position: int) -> int:
    """A number below 2^63 for a position in an epoch's order."""
    return splitmix(state, position + 1) >> 1


class SeededDataset(Dataset):
    """A dataset that seeds Python, NumPy and PyTorch from each index; it has the inner one's attributes.

    A data sample keeps its seed as `draw_seed`, with which MaPeT draws the image's permutation. An image that
    the storage does not give is tried again, see `read_patiently`.

    Raises:
        PipelineError: an error in the pipeline, with the path of the image.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.__dict__["dataset"] = dataset  # past `__setattr__`, which sets the dataset's attributes

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
        try:
            return read_patiently(lambda: self._load(int(index), seed))
        except Exception as error:
            info_of = getattr(self.dataset, "get_data_info", lambda index: {})
            path = info_of(int(index)).get("img_path")
            if isinstance(error, UserError) and str(path) in str(error):  # it names the image itself
                raise
            if is_of_storage(error):
                raise PipelineError(storage_message(path, error)) from error
            raise PipelineError(f"image `{path}`: {reason_of(error)}; {REMEDY}") from error

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """The items of many indices, or the batch of a dataset that gives whole ones, as StoredImages."""
        if not getattr(self.dataset, "gives_whole_batches", False):
            return [self[index] for index in indices]
        try:
            batch = self.dataset.__getitems__(indices)
        except OSError:  # one by one they are read again, and an error names its image
            return [self[index] for index in indices]
        for index, sample in zip(indices, batch["data_samples"], strict=True):
            if hasattr(index, "seed"):
                sample.set_metainfo({DRAW_SEED: index.seed})
        return batch

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
        elif isinstance(sample, dict) and "img" in sample:  # it is not packed yet: see `whole_batch`
            sample[DRAW_SEED] = seed
        return sample
