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

from mapet_mm.models.data_preprocessors.data_preprocessor import check_pixel_range
from mapet_mm.tokenizers.images import NamedImages
from mapet_mm.utils.dist import process_number
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.loader_workers import tensor_bytes, usable_workers
from mapet_mm.utils.shared_work import my_blocks

GROUP_SIZE = 32
Result = TypeVar("Result")


class ImageGroup(NamedTuple):
    """Images of a block for one pass of the encoder, on its device; inputs beyond `indices` are padding."""

    block: int
    indices: list[int]  # of the images that were decoded
    inputs: Float[Tensor, "group 3 height width"]
    reasons: dict[int, str]  # why the others were not, by index


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
        self.images = images
        self.preprocessor = preprocessor
        self.group_size = group_size
        self.num_workers = num_workers
        self._collate = partial(_collate, size=group_size, side=image_size, path=images.path)

    def load(self, groups: Iterable[tuple[int, Sequence[int]]]) -> Iterator[ImageGroup]:
        """Load groups: pairs of a block's index and the indices of at most `group_size` of its images."""
        # The workers run ahead, so the blocks of the groups that they were given wait here.
        blocks: deque[int] = deque()

        def batches() -> Iterator[list[int]]:
            for block, indices in groups:
                blocks.append(block)
                yield [int(index) for index in indices]

        num_workers = usable_workers(self.num_workers, lambda: tensor_bytes(self._collate([self.images[0]])))
        loader = DataLoader(
            self.images,
            batch_sampler=batches(),
            num_workers=num_workers,
            collate_fn=self._collate,
        )
        for indices, padded, reasons in loader:
            check_pixel_range(self.preprocessor, padded[: len(indices)])
            inputs = self.preprocessor({"inputs": padded, "data_samples": None})["inputs"]
            yield ImageGroup(blocks.popleft(), indices, inputs, reasons)


def split(indices: Sequence[int], size: int) -> list[Sequence[int]]:
    """Cut a sequence into pieces of a size; the last one may be smaller."""
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def encode_blocks(
    loader: GroupLoader,
    encode: Callable[[ImageGroup], Iterable[Result]],
    num_blocks: int,
    pending: Callable[[int], Sequence[int]],
    title: str,
    flush_seconds: float = float("inf"),
) -> Iterator[tuple[int, dict[int, Result], dict[int, str]]]:
    """Encode images in blocks, shared with other processes.

    Yields a block, its images' results by index, and by index why others have none.

    Args:
        loader: loads the images.
        encode: gives a group's results, in order; results of padding are dropped.
        num_blocks: number of blocks.
        pending: indices of a block's images that have no result yet; asked whenever the block is looked at.
        title: text of the progress bar.
        flush_seconds: also yield what there is of a block when this time has passed.
    """
    rank, num_processes = process_number()
    total = sum(len(pending(block)) for block in range(num_blocks))
    groups = loader.load(_my_groups(num_blocks, pending, loader.group_size))
    with tqdm(total=total, desc=title, unit="image", disable=rank > 0 or not total) as bar:
        for block, groups_of_block in groupby(groups, key=lambda group: group.block):
            results: dict[int, Result] = {}
            reasons: dict[int, str] = {}
            flushed = time.monotonic()
            for group in groups_of_block:
                results.update(zip(group.indices, encode(group), strict=False))
                reasons.update(group.reasons)
                # The other processes are about as fast.
                num_images = num_processes * (len(group.indices) + len(group.reasons))
                bar.update(min(num_images, total - bar.n))
                if time.monotonic() > flushed + flush_seconds:
                    yield block, results, reasons
                    flushed = time.monotonic()
            yield block, results, reasons


def _my_groups(
    num_blocks: int, pending: Callable[[int], Sequence[int]], group_size: int
) -> Iterator[tuple[int, Sequence[int]]]:
    """Groups of the blocks that this process takes, until nothing is pending in any block."""
    taken: set[int] = set()

    def is_done(block: int) -> bool:
        return block in taken or not len(pending(block))

    for block in my_blocks(num_blocks, is_done):
        taken.add(block)
        for indices in split(pending(block), group_size):
            if not len(pending(block)):  # another process was faster
                break
            yield block, indices


def _collate(
    samples: Sequence[tuple[int, Tensor | str]], size: int, side: int, path: Callable[[int], str]
) -> tuple[list[int], Tensor, dict[int, str]]:
    """Indices of the decoded images, their pixels padded to a group, and why the others failed."""
    decoded = [(index, image) for index, image in samples if isinstance(image, Tensor)]
    dtype = decoded[0][1].dtype if decoded else torch.uint8
    padded = torch.zeros(size, 3, side, side, dtype=dtype)
    for row, (index, image) in zip(padded, decoded, strict=False):
        if (image.shape, image.dtype) != (row.shape, row.dtype):
            raise UserError(
                f"the pipeline gives image `{path(index)}` as {image.dtype} of shape {tuple(image.shape)}, "
                f"the tokenizer takes {row.dtype} of shape {tuple(row.shape)}: resize to that size before "
                "PackInputs, and load all images with color_type='color' (three channels of 8 bit)"
            )
        row.copy_(image)
    reasons = {index: reason for index, reason in samples if isinstance(reason, str)}
    return [index for index, _ in decoded], padded, reasons
