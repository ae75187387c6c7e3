"""Images for an encoder, in groups of one size, so that its results do not depend on how they were loaded."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from mapet_mm.tokenizers.images import NamedImages, image_loader, normalise

GROUP_SIZE = 32


class ImageGroup(NamedTuple):
    """Images for one pass of the encoder.

    `slots` and `positions` say which of the inputs is which image; the others are padding. `unreadable` has
    the positions of the images that could not be decoded, with the reason.
    """

    slots: np.ndarray
    positions: np.ndarray
    inputs: Float[Tensor, "group 3 height width"]
    unreadable: list[tuple[int, str]]


class GroupedImages:
    """Decoded and normalised images in groups, each padded with black images to the same size.

    A convolution's last bits depend on the number of images it is given; in groups of one size, an image has
    the same features whatever the loader's batch size and workers, the processes, and what was done before.

    Args:
        images: the images.
        groups: positions of each group, at most `size`; a group without any is all padding.
        size: images of a group.
        image_size: side of the padding in pixels.
        preprocessor: MMPretrain data preprocessor.
        batch_size: images that a loader's worker hands over at a time.
        num_workers: of the loader.

    Attributes:
        waited: seconds spent waiting for decoded images so far.
    """

    def __init__(
        self,
        images: NamedImages,
        groups: Sequence[Sequence[int]],
        size: int,
        image_size: int,
        preprocessor: nn.Module,
        batch_size: int = 32,
        num_workers: int = 2,
    ) -> None:
        self.groups, self.size, self.image_size = groups, size, image_size
        self.preprocessor = preprocessor
        positions = [position for group in groups for position in group]
        batches = split(positions, batch_size)
        self.loader = image_loader(images, batches, num_workers, pin_memory=False)
        self.waited = 0.0

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[ImageGroup]:
        batches = iter(self.loader)
        decoded: dict[int, Tensor] = {}
        reasons: dict[int, str] = {}
        for group in self.groups:
            while any(position not in decoded and position not in reasons for position in group):
                start = time.perf_counter()
                batch = next(batches)
                self.waited += time.perf_counter() - start
                reasons.update(batch.unreadable)
                if batch.images is not None:
                    decoded.update(zip(batch.positions.tolist(), batch.images, strict=True))
            yield self._group(list(group), decoded, reasons)

    def _group(self, group: list[int], decoded: dict[int, Tensor], reasons: dict[int, str]) -> ImageGroup:
        slots = [slot for slot, position in enumerate(group) if position in decoded]
        shape = (3, self.image_size, self.image_size)
        dtype = decoded[group[slots[0]]].dtype if slots else torch.uint8
        padded = torch.zeros(self.size, *shape, dtype=dtype)
        for slot in slots:
            image = decoded.pop(group[slot])
            if image.shape != shape:
                raise ValueError(
                    f"the pipeline gives images of {image.shape[1]} x {image.shape[2]} px, the tokenizer "
                    f"takes {shape[1]} x {shape[2]}: end it with that size before PackInputs"
                )
            padded[slot] = image
        return ImageGroup(
            np.array(slots, dtype=np.int64),
            np.array([group[slot] for slot in slots], dtype=np.int64),
            normalise(self.preprocessor, padded),
            [(position, reasons[position]) for position in group if position in reasons],
        )


def split(positions: Sequence[int], size: int) -> list[Sequence[int]]:
    """Consecutive groups of at most `size`."""
    return [positions[start : start + size] for start in range(0, len(positions), size)]
