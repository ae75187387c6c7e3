"""Load, decode and normalise images in groups of a fixed size; each group is one pass of an encoder.

A convolution's last bits depend on the batch size. With groups of a fixed size, an image has the same
features whichever images share its group.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mapet_mm.models.utils.pixel_range import check_images_of
from mapet_mm.tokenizers.images import NamedImages

GROUP_SIZE = 32


class ImageGroup(NamedTuple):
    """Images for one pass of the encoder.

    Args:
        task: number of the task that the group is part of.
        places: indices in the dataset of the first inputs' images; the other inputs are padding.
        inputs: `(group, 3, H, W)`, normalised, on the preprocessor's device.
        unreadable: index of each image that could not be decoded, with the reason.
    """

    task: int
    places: list[int]
    inputs: Float[Tensor, "group 3 height width"]
    unreadable: dict[int, str]


class GroupLoader:
    """Loads groups of images in the order requested.

    Args:
        images: the dataset.
        image_size: side in pixels that the pipeline must produce.
        preprocessor: MMPretrain data preprocessor with the tokenizer's mean and standard deviation.
        group_size: images per group; smaller groups are padded with black images.
        num_workers: number of decoding processes.
    """

    def __init__(
        self,
        images: NamedImages,
        image_size: int,
        preprocessor: nn.Module,
        group_size: int = GROUP_SIZE,
        num_workers: int = 2,
    ) -> None:
        self.images, self.preprocessor = images, preprocessor
        self.group_size, self.num_workers = group_size, num_workers
        self._collate = partial(_collate, size=group_size, side=image_size, path=images.path)
        self._range_checked = False
        self.waited = 0.0  # seconds spent waiting for decoded images

    def load(self, groups: Iterable[tuple[int, Sequence[int]]]) -> Iterator[ImageGroup]:
        """Load groups; the iterable is consumed as the workers need it.

        Args:
            groups: pairs of a task's number and the indices of at most `group_size` of its images.
        """
        order: deque[int] = deque()

        def batches() -> Iterator[list[int]]:
            for task, places in groups:
                order.append(task)
                yield [int(place) for place in places]

        loader = DataLoader(
            self.images, batch_sampler=batches(), num_workers=self.num_workers, collate_fn=self._collate
        )
        loaded = iter(loader)
        while True:
            start = time.perf_counter()
            batch = next(loaded, None)
            self.waited += time.perf_counter() - start
            if batch is None:
                return
            places, padded, unreadable = batch
            if places and not self._range_checked:  # the first images stand for all
                check_images_of(self.preprocessor, padded[: len(places)])
                self._range_checked = True
            inputs = self.preprocessor({"inputs": padded, "data_samples": None})["inputs"]
            yield ImageGroup(order.popleft(), places, inputs, unreadable)


def split(places: Sequence[int], size: int) -> list[Sequence[int]]:
    """Consecutive pieces of at most `size`."""
    return [places[start : start + size] for start in range(0, len(places), size)]


def _collate(
    samples: Sequence[tuple[int, Tensor | str]], size: int, side: int, path: Callable[[int], str]
) -> tuple[list[int], Tensor, dict[int, str]]:
    """Indices of the decoded images, their pixels padded to a group, and why the others failed."""
    read = [(place, image) for place, image in samples if isinstance(image, Tensor)]
    padded = torch.zeros(size, 3, side, side, dtype=read[0][1].dtype if read else torch.uint8)
    for slot, (place, image) in zip(padded, read, strict=False):
        if (channels := len(image)) != len(slot):
            raise ValueError(
                f"the pipeline gives image `{path(place)}` with {channels} channel"
                f"{'' if channels == 1 else 's'}, the tokenizer takes {len(slot)}: load images with "
                "color_type='color'"
            )
        if image.shape != slot.shape:
            raise ValueError(
                f"the pipeline gives image `{path(place)}` in {image.shape[1]} x {image.shape[2]} px, the "
                f"tokenizer takes {side} x {side}: end it with that size before PackInputs"
            )
        if image.dtype != slot.dtype:
            raise ValueError(
                f"the pipeline gives image `{path(place)}` as {image.dtype}, `{path(read[0][0])}` as "
                f"{slot.dtype}: load all with one bit depth (LoadImageFromFile's color_type='color' makes "
                "them 8 bit)"
            )
        slot.copy_(image)
    unreadable = {place: reason for place, reason in samples if isinstance(reason, str)}
    return [place for place, _ in read], padded, unreadable
