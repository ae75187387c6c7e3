"""Which part of an image its tokens cover: what the tokenizer saw of it, at the image's own resolution."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from PIL import Image, ImageOps

from mapet_mm.engine.hooks.probed_pipeline import ProbedPipeline, recorded_pipeline
from mapet_mm.structures.store import TokenStore, TokenStoreError
from mapet_mm.utils.errors import reason_of

# Of an image's width: what resizing may bend at its edges.
TOLERANCE = 0.05


class Box(NamedTuple):
    """A part of an image in pixels; it may reach beyond the image, where a pipeline pads."""

    left: float
    top: float
    width: float
    height: float


class CoveredParts:
    """Opens images and finds the parts of them that the token grids of a store cover.

    Images are turned as the tokenizer's were. The part is found by sending images of coordinates through the
    pipeline that the store records; without a record it is the largest centred part of the grid's shape.
    """

    def __init__(self, store: TokenStore) -> None:
        self._store = store
        self._turns: bool | None = None  # whether the loading step turns photos, once it is known
        self._seen: dict[tuple[int, int], Box] = {}  # by the size that the pipeline reads, as shares of it

    def open(self, path: Path) -> tuple[Image.Image, Box]:
        """An image, and the part that its tokens cover.

        Raises:
            TokenStoreError: the recorded pipeline does not take the image, or shows no upright rectangle.
        """
        image = Image.open(path)
        if self._store.preprocessing is None:
            image = ImageOps.exif_transpose(image)
            return image, largest_centred(image.size, self._store.grid)
        pipeline = recorded_pipeline(_OneImage(path), self._store)
        try:
            pipeline(0)
            if self._turns is None:
                self._turns = pipeline.turns_photos() is not False
            if self._turns:
                image = ImageOps.exif_transpose(image)
            if pipeline.size not in self._seen:
                self._seen[pipeline.size] = _part_seen(pipeline)
        except Exception as error:
            raise TokenStoreError(
                f"the pipeline that token store `{self._store.path}` records does not say which part of "
                f"`{path}` its tokens cover ({reason_of(error)}): such patches cannot be drawn"
            ) from error
        left, top, width, height = self._seen[pipeline.size]
        return image, Box(left * image.width, top * image.height, width * image.width, height * image.height)


def largest_centred(size: tuple[int, int], grid: tuple[int, int]) -> Box:
    """The largest centred part of an image of `(width, height)` px with the shape of a grid of `(H, W)`."""
    side = min(size[1] / grid[0], size[0] / grid[1])  # pixels of a patch
    width, height = side * grid[1], side * grid[0]
    return Box((size[0] - width) / 2, (size[1] - height) / 2, width, height)


class _OneImage:
    """A dataset of one image without label."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pipeline: Callable[[dict], Any]

    def __getitem__(self, index: int) -> Any:
        return self.pipeline({"img_path": str(self.path), "sample_idx": index})


def _part_seen(pipeline: ProbedPipeline) -> Box:
    """The part of the images that a pipeline shows, in shares of their width and height.

    Two images of coordinates show it. A black one and a white one tell what the pipeline does to all values,
    and where it pads.
    """
    height, width = pipeline.size
    black, white = (_shown(pipeline, np.full((height, width), value)) for value in (0, 255))
    contrast = white - black
    inside = np.abs(contrast) > 0.99 * np.abs(contrast).max()
    starts, lengths, rng = [], [], np.random.default_rng(0)
    for axis, length in enumerate((height, width)):
        ramp = (np.arange(length) + 0.5) * (255 / length)
        # Dithered: whole numbers that have the ramp's mean.
        image = np.floor(np.expand_dims(ramp, 1 - axis) + rng.random((height, width)))
        shares = (_shown(pipeline, image) - black)[inside] / contrast[inside]
        places = (np.nonzero(inside)[axis] + 0.5) / inside.shape[axis]
        slope, start = np.polyfit(places, shares, 1).tolist()
        if slope <= 0 or np.abs(slope * places + start - shares).mean() > TOLERANCE:
            raise ValueError("it shows no upright rectangle of an image")
        starts.append(start)
        lengths.append(slope)
    return Box(starts[1], starts[0], lengths[1], lengths[0])


def _shown(pipeline: ProbedPipeline, image: np.ndarray) -> Float[np.ndarray, "height width"]:
    return pipeline(0, image.astype(np.uint8)).images[0].astype(np.float64)
