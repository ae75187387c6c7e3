"""Other loaders for the same photographs: batches from a folder `images`, in one worker of one thread."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

SIDE = 224
JITTER = 0.4


class TorchvisionImages(Dataset):
    """torchvision: decode, the largest centred square, resize with antialiasing, jitter."""

    def __init__(self, root: Path) -> None:
        from torchvision.transforms import v2

        self.files = sorted(map(str, (root / "images").iterdir()))
        self.jitter = v2.ColorJitter(JITTER, JITTER, JITTER)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        from torchvision.io import decode_image
        from torchvision.transforms.v2 import InterpolationMode, functional

        image = decode_image(self.files[index])
        image = functional.center_crop(image, [min(image.shape[1:])] * 2)
        image = functional.resize(image, [SIDE, SIDE], InterpolationMode.BICUBIC, antialias=True)
        return self.jitter(image)


class TimedSampler(Sampler):
    """Random images for so many seconds, after the first ones, for which the worker has to start."""

    first = 1024  # images

    def __init__(self, dataset: Dataset, seconds: float, seed: int = 0) -> None:
        self.num_images = len(dataset)
        self.seconds = seconds
        self.rng = random.Random(seed)

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.first):
            yield self.rng.randrange(self.num_images)
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            yield self.rng.randrange(self.num_images)


def torchvision_batches(root: Path, batch: int, seconds: float) -> Iterable:
    """PyTorch's loader."""
    dataset = TorchvisionImages(root)
    return DataLoader(dataset, batch, sampler=TimedSampler(dataset, seconds), num_workers=1, drop_last=True)


def dali_batches(root: Path, batch: int, seconds: float) -> Iterable:
    """DALI's pipeline for CPUs, in a thread of this process: decode, crop, resize, jitter."""
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=batch, num_threads=1, device_id=None)
    def pipeline():
        files, _ = fn.readers.file(file_root=str(root), dir_filters=["images"], random_shuffle=True)
        # The largest centred square.
        window = dict(start=[0, 62], shape=[375, 375], axes=[0, 1])
        images = fn.decoders.image_slice(files, device="cpu", **window)
        images = fn.resize(images, size=SIDE, interp_type=types.INTERP_CUBIC, antialias=True)
        factors = [fn.random.uniform(range=[1 - JITTER, 1 + JITTER]) for _ in range(3)]
        names = ("brightness", "contrast", "saturation")
        return fn.color_twist(images, **dict(zip(names, factors, strict=True)))

    built = pipeline()
    built.build()
    for _ in range(TimedSampler.first // batch):
        yield built.run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        yield built.run()


# Package and batches of each peer.
PEERS = {
    "torchvision v2: decode, jitter": ("torchvision", torchvision_batches),
    "DALI for CPUs: decode, jitter": ("nvidia.dali", dali_batches),
}
