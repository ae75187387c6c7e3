"""Seeds for each image's random draws, an order of images that starts anywhere, and unreadable images."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from mmcv.transforms import LoadImageFromFile
from mmengine.config import Config
from mmengine.dist import get_dist_info, sync_random_seed
from mmengine.registry import DATA_SAMPLERS as ALL_SAMPLERS
from mmengine.registry import DATASETS as ALL_DATASETS
from mmengine.structures import BaseDataElement
from torch.utils.data import Dataset, Sampler

from mapet_mm.datasets.pipelines import find_step, leaf_datasets
from mapet_mm.registry import DATA_SAMPLERS, DATASETS
from mapet_mm.utils.config import type_name
from mapet_mm.utils.errors import UserError, reason_of

DRAW_SEED = "draw_seed"  # in an image's data sample
MASK = 2**64 - 1


class UnreadableImageError(UserError):
    """An image of the training set cannot be read; the message names it."""


def seed_dataloaders(cfg: Config) -> None:
    """Let images draw by seed, image and epoch if the config has `default_hooks.epoch_seed`."""
    hook, loader = (cfg.get("default_hooks") or {}).get("epoch_seed"), cfg.get("train_dataloader")
    if hook is None or not loader or type_name(loader.sampler.type) == "SeededSampler":
        return
    seed = (cfg.get("randomness") or {}).get("seed")
    loader.sampler = dict(type="mapet_mm.SeededSampler", sampler=loader.sampler, seed=seed)
    loader.dataset = dict(type="mapet_mm.SeededDataset", dataset=loader.dataset)


class SeededIndex(int):
    """An image's index in its dataset that carries the seed of its draws to the worker that loads it."""

    seed: int

    def __new__(cls, index: int, seed: int) -> SeededIndex:
        self = super().__new__(cls, index)
        self.seed = seed
        return self

    def __reduce__(self) -> tuple:
        return SeededIndex, (int(self), self.seed)


@DATA_SAMPLERS.register_module()
class SeededSampler(Sampler):
    """The order of another sampler, in which each index carries a seed, and which starts at any image.

    An image's seed depends on the run's seed, the epoch and the image's place in the epoch's order over all
    processes, so not on the number of workers, nor of processes with the same total batch.

    Args:
        dataset: the dataset.
        sampler: config of the sampler that orders the images, by a `seed` of its own if it has one.
        seed: of the run, the same in all processes.

    Attributes:
        start: images of this process to leave out when the next epoch begins.
    """

    def __init__(self, dataset: Dataset, sampler: Mapping[str, Any], seed: int | None = None) -> None:
        self.dataset, self.config = dataset, dict(sampler)
        self.reseed(sync_random_seed() if seed is None else seed)
        self.rank, self.world_size = get_dist_info()
        self.epoch = self.start = self.skipped = 0
        if hasattr(self.sampler, "skip"):  # MMEngine skips by this name; batch by batch where it is not there
            self.skip = self._skip

    def reseed(self, seed: int) -> None:
        """Begin anew with a run's seed, as a resumed run does whose config has none."""
        self.seed = seed
        self.sampler = ALL_SAMPLERS.build(self.config, default_args=dict(dataset=self.dataset, seed=seed))

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
        start, first = self.start, self.skipped + self.start
        self.start = self.skipped = 0
        state = epoch_state(self.seed, self.epoch)
        for index, place in zip(islice(self.sampler, start, None), count(first), strict=False):
            yield SeededIndex(index, draw_seed(state, place * self.world_size + self.rank))


def epoch_state(seed: int, epoch: int) -> int:
    """First of an epoch's seeds."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0])


def draw_seed(state: int, place: int) -> int:
    """A number below 2^63 for a place in an epoch's order (SplitMix64)."""
    mixed = state + (place + 1) * 0x9E3779B97F4A7C15 & MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
    return (mixed ^ mixed >> 31) >> 1


@DATASETS.register_module()
class SeededDataset(Dataset):
    """A dataset that seeds Python, NumPy and PyTorch from each index; it has the inner one's attributes.

    A data sample keeps its seed as `draw_seed`, with which MaPeT draws the image's permutation.

    Args:
        dataset: the dataset, or its config.

    Raises:
        UnreadableImageError: an image cannot be read; other errors in the pipeline are raised unchanged.
    """

    def __init__(self, dataset: Dataset | Mapping[str, Any]) -> None:
        self.__dict__["dataset"] = ALL_DATASETS.build(dataset) if isinstance(dataset, Mapping) else dataset

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # during unpickling, or looked up by a loader
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        try:
            return self._load(int(index), getattr(index, "seed", None))
        except Exception as error:
            if (path := self._unreadable(int(index))) is None:
                raise
            raise UnreadableImageError(
                f"image `{path}` cannot be read ({reason_of(error)}): repair it, or leave such images "
                "out by ignore_empty=True in the pipeline's LoadImageFromFile"
            ) from error

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

    def _unreadable(self, index: int) -> str | None:
        """Path of an image if the pipeline's own loading step fails on it alone."""
        load = find_step(getattr(next(leaf_datasets(self.dataset)), "pipeline", None), LoadImageFromFile)
        if load is None:
            return None
        info = self.dataset.get_data_info(index)
        try:
            load(dict(info))
        except Exception:
            return info.get("img_path")
        return None
