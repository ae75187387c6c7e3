"""Fill parts with what is computed of each image: the one loop, shared by any number of processes.

Images are encoded in groups of a fixed size, because a convolution's last bits depend on the batch size. So
an image has the same features whichever images share its group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from mapet_mm.models.data_preprocessors.data_preprocessor import PixelRange
from mapet_mm.structures.parts import PENDING, WRITTEN, Parts
from mapet_mm.tokenizers.images import NamedImages
from mapet_mm.utils.atomic_files import remove_stale
from mapet_mm.utils.dist import process_number
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.loader_workers import tensor_bytes, usable_workers
from mapet_mm.utils.shared_work import my_blocks

GROUP_SIZE = 32


class ImageGroup(NamedTuple):
    """Images of a part for one pass of the encoder, on its device; inputs beyond `indices` are padding."""

    part: int
    indices: list[int]  # of the images that were decoded
    inputs: Any  # Float[Tensor, "group 3 height width"] from a GroupLoader
    reasons: dict[int, str]  # why the others were not, by index


class GroupLoader:
    """Loads groups of images for an encoder, in the order requested.

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
        self._groups = _Groups(images, group_size, image_size)
        self.pixel_range = getattr(preprocessor, "pixel_range", PixelRange())  # one look is enough

    def load(self, groups: Iterable[tuple[int, Sequence[int]]]) -> Iterator[ImageGroup]:
        """Load groups: pairs of a part's index and the indices of at most `group_size` of its images."""
        num_workers = usable_workers(
            self.num_workers, lambda: tensor_bytes(self._groups.__getitems__((0, [0])))
        )
        device = self.preprocessor.device
        # A group travels as it is: workers get the pair, and give what `_Groups` makes of it.
        loader = DataLoader(
            self._groups,
            batch_sampler=groups,
            num_workers=num_workers,
            collate_fn=_unchanged,
            pin_memory=device.type == "cuda",  # only from there GPUs copy while they compute
        )
        for group in loader:
            self.pixel_range.check(group.inputs[: len(group.indices)], self.preprocessor)
            inputs = group.inputs.to(device, non_blocking=True)
            inputs = self.preprocessor({"inputs": inputs, "data_samples": None})["inputs"]
            yield group._replace(inputs=inputs)


class _Groups(Dataset):
    """Images in groups: an item is decoded and padded as a whole."""

    def __init__(self, images: NamedImages, size: int, side: int) -> None:
        self.images = images
        self.size = size
        self.side = side

    def __getitems__(self, group: tuple[int, Sequence[int]]) -> ImageGroup:
        part, indices = group
        samples = [self.images[int(index)] for index in indices]
        decoded = [(index, image) for index, image in samples if isinstance(image, Tensor)]
        dtype = decoded[0][1].dtype if decoded else torch.uint8
        padded = torch.zeros(self.size, 3, self.side, self.side, dtype=dtype)
        for row, (index, image) in zip(padded, decoded, strict=False):
            if (image.shape, image.dtype) != (row.shape, row.dtype):
                raise UserError(
                    f"the pipeline gives image `{self.images.path(index)}` as {image.dtype} of shape "
                    f"{tuple(image.shape)}, the tokenizer takes {row.dtype} of shape {tuple(row.shape)}: "
                    "resize to that size before PackInputs, and load all images with color_type='color' "
                    "(three channels of 8 bit)"
                )
            row.copy_(image)
        reasons = {index: reason for index, reason in samples if isinstance(reason, str)}
        return ImageGroup(part, [index for index, _ in decoded], padded, reasons)


def _unchanged(group: ImageGroup) -> ImageGroup:
    return group


def split(indices: Sequence[int], size: int) -> list[Sequence[int]]:
    """Cut a sequence into pieces of a size; the last one may be smaller."""
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def fill(
    parts: Parts,
    image_of_row: Int64[np.ndarray, " rows"],
    loader: Any,
    encode: Callable[[ImageGroup], Any],
    title: str,
    refuse: Callable[[np.ndarray], str | None] = lambda value: None,
    skips: bool = False,
    retry_skipped: bool = False,
    flush_seconds: float = float("inf"),
) -> tuple[int, dict[int, str]]:
    """Write the rows that are pending; returns how many images were, and why others were not, by image.

    Any number of processes and machines may do this at once: each takes parts by its rank, and at the end
    what others have left. A kill costs what was computed since the last part was written.

    Args:
        parts: receive the rows; all processes must see them.
        image_of_row: index of each row's image for the loader, -1 if it is not there.
        loader: decodes the images: a `GroupLoader`, or what has its `load` and `group_size`.
        encode: gives a group's rows, in order; rows of padding are dropped.
        title: text of the progress bar.
        refuse: why a row cannot be kept, None if it can.
        skips: record images without a row, with the reason; without it, they stay pending.
        retry_skipped: try the images again that were skipped.
        flush_seconds: also write what there is of a part when this time has passed.
    """

    def pending(part: int) -> Int64[np.ndarray, " images"]:
        states = parts.states(part)
        is_pending = states != WRITTEN if retry_skipped else states == PENDING
        rows = parts.part_range(part)
        images = image_of_row[rows.start : rows.stop]
        return images[is_pending & (images >= 0)]

    remove_stale(parts.folder / "parts")
    rank, num_processes = process_number()
    total = sum(len(pending(part)) for part in range(len(parts)))
    num_written = 0
    failed: dict[int, str] = {}
    groups = loader.load(_my_groups(len(parts), pending, loader.group_size))
    with tqdm(total=total, desc=title, unit="image", disable=rank > 0 or not total) as bar:
        for part, groups_of_part in groupby(groups, key=lambda group: group.part):
            rows = parts.part_range(part)
            results = _Results(image_of_row[rows.start : rows.stop], refuse)
            flushed = time.monotonic()
            for group in groups_of_part:
                results.add(group, encode(group))
                # The other processes are about as fast.
                num_images = num_processes * (len(group.indices) + len(group.reasons))
                bar.update(min(num_images, total - bar.n))
                if time.monotonic() > flushed + flush_seconds:
                    num_written += results.write(parts, part, skips)
                    flushed = time.monotonic()
            # If another process was faster, nothing is left to write.
            if len(pending(part)):
                num_written += results.write(parts, part, skips)
            failed.update(results.failed)
    return num_written, failed


def _my_groups(
    num_parts: int, pending: Callable[[int], Sequence[int]], group_size: int
) -> Iterator[tuple[int, Sequence[int]]]:
    """Groups of the parts that this process takes, until nothing is pending in any part."""
    taken: set[int] = set()

    def is_done(part: int) -> bool:
        return part in taken or not len(pending(part))

    for part in my_blocks(num_parts, is_done):
        taken.add(part)
        for indices in split(pending(part), group_size):
            if not len(pending(part)):  # another process was faster
                break
            yield part, indices


class _Results:
    """What was computed of a part and is not written yet.

    Attributes:
        failed: by image, why it has no row; also of what was written before.
    """

    def __init__(
        self, images: Int64[np.ndarray, " rows"], refuse: Callable[[np.ndarray], str | None]
    ) -> None:
        self.failed: dict[int, str] = {}
        self._slots = {image: slot for slot, image in enumerate(images.tolist())}
        self._refuse = refuse
        self._groups: list[tuple[list[int], Any]] = []

    def add(self, group: ImageGroup, rows: Any) -> None:
        """Take a group's rows, which may be on a device: they stay there until they are written."""
        self._groups.append((group.indices, rows))
        self.failed.update(group.reasons)

    def write(self, parts: Parts, part: int, skips: bool) -> int:
        """Write the rows, and forget them; returns their number."""
        slots, values = [], []
        for indices, rows in self._groups:
            rows = rows.numpy(force=True) if isinstance(rows, Tensor) else rows
            for index, row in zip(indices, rows, strict=False):  # what follows is of padding
                reason = self._refuse(row)
                if reason is None:
                    slots.append(self._slots[index])
                    values.append(row.reshape(parts.shape))
                else:
                    self.failed[index] = reason
        reasons = {}
        if skips:
            reasons = {self._slots[index]: reason for index, reason in self.failed.items()}
        if slots or reasons:
            parts.update(part, slots, values, reasons)
        self._groups = []
        return len(slots)
