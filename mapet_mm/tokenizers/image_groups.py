"""Load, decode and normalise images in groups of a fixed size; each group is one pass of an encoder.

A convolution's last bits depend on the batch size. With groups of a fixed size, an image has the same
features whichever images share its group.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from mapet_mm.models.utils.data_preprocessor import check_pixel_range
from mapet_mm.tokenizers.images import NamedImages
from mapet_mm.utils.dist import process_number
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.shared_work import my_blocks

GROUP_SIZE = 32
Result = TypeVar("Result")


class ImageGroup(NamedTuple):
    """Images of a block for one pass of the encoder, on its device; inputs beyond `places` are padding."""

    block: int
    places: list[int]
    inputs: Float[Tensor, "group 3 height width"]
    unreadable: dict[int, str]  # reason by place


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

    def load(self, groups: Iterable[tuple[int, Sequence[int]]]) -> Iterator[ImageGroup]:
        """Load groups: pairs of a block's number and the indices of at most `group_size` of its images."""
        order: deque[int] = deque()

        def batches() -> Iterator[list[int]]:
            for block, places in groups:
                order.append(block)
                yield [int(place) for place in places]

        options = dict(batch_sampler=batches(), num_workers=self.num_workers, collate_fn=self._collate)
        for places, padded, unreadable in DataLoader(self.images, **options):
            check_pixel_range(self.preprocessor, padded[: len(places)])
            inputs = self.preprocessor({"inputs": padded, "data_samples": None})["inputs"]
            yield ImageGroup(order.popleft(), places, inputs, unreadable)


def split(places: Sequence[int], size: int) -> list[Sequence[int]]:
    return [places[start : start + size] for start in range(0, len(places), size)]


def encode_blocks(
    loader: GroupLoader,
    encode: Callable[[ImageGroup], Iterable[Result]],
    number: int,
    lacking: Callable[[int], Sequence[int]],
    what: str,
    flush_seconds: float = float("inf"),
) -> Iterator[tuple[int, dict[int, Result], dict[int, str]]]:
    """Encode images in blocks, shared with other processes; yield a block's results and failures by place.

    Args:
        loader: loads the images.
        encode: gives a group's results, in order; results of padding are dropped.
        number: of blocks.
        lacking: places of a block's images that have no result yet; asked whenever the block is looked at.
        what: text of the progress bar.
        flush_seconds: also yield what there is of a block when this time has passed.
    """
    taken: set[int] = set()

    def groups() -> Iterator[tuple[int, Sequence[int]]]:
        for block in my_blocks(number, lambda one: one in taken or not len(lacking(one))):
            taken.add(block)
            for places in split(lacking(block), loader.group_size):
                if not len(lacking(block)):  # another process was faster
                    break
                yield block, places

    rank, processes = process_number()
    total = sum(len(lacking(block)) for block in range(number))
    with tqdm(total=total, desc=what, unit="image", disable=rank > 0 or not total) as bar:
        for block, loaded in groupby(loader.load(groups()), key=lambda group: group.block):
            results: dict[int, Result] = {}
            reasons: dict[int, str] = {}
            flushed = time.monotonic()
            for group in loaded:
                results |= zip(group.places, encode(group), strict=False)
                reasons |= group.unreadable
                # The other processes are about as fast.
                images = processes * (len(group.places) + len(group.unreadable))
                bar.update(min(images, total - bar.n))
                if time.monotonic() > flushed + flush_seconds:
                    yield block, results, reasons
                    flushed = time.monotonic()
            yield block, results, reasons


def _collate(
    samples: Sequence[tuple[int, Tensor | str]], size: int, side: int, path: Callable[[int], str]
) -> tuple[list[int], Tensor, dict[int, str]]:
    """Indices of the decoded images, their pixels padded to a group, and why the others failed."""
    read = [(place, image) for place, image in samples if isinstance(image, Tensor)]
    padded = torch.zeros(size, 3, side, side, dtype=read[0][1].dtype if read else torch.uint8)
    for slot, (place, image) in zip(padded, read, strict=False):
        if (image.shape, image.dtype) != (slot.shape, slot.dtype):
            raise UserError(
                f"the pipeline gives image `{path(place)}` as {image.dtype} of shape {tuple(image.shape)}, "
                f"the tokenizer takes {slot.dtype} of shape {tuple(slot.shape)}: resize to that size before "
                "PackInputs, and load all images with color_type='color' (three channels of 8 bit)"
            )
        slot.copy_(image)
    unreadable = {place: reason for place, reason in samples if isinstance(reason, str)}
    return [place for place, _ in read], padded, unreadable
