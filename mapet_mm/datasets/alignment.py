"""Test, with synthetic images, that a pipeline keeps images aligned with their tokens."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float
from mmcv.transforms import LoadImageFromFile
from mmengine.dataset import Compose
from mmengine.registry import DefaultScope
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from mapet_mm.datasets.pipelines import find_step, own_randomness, pipeline_steps
from mapet_mm.datasets.transforms.load_picture import LoadPicture
from mapet_mm.datasets.transforms.token_grid import LoadTokenGrid
from mapet_mm.registry import TRANSFORMS
from mapet_mm.structures import TokenStore, TokenStoreError
from mapet_mm.utils.errors import reason_of

# A step that moves pixels with probability 0.1 is missed once in 850 runs.
DRAWS = 64
# Two grey levels that stay apart under inversion, solarisation at any threshold, and posterisation.
LEVELS = (60, 220)
# Samples per side of a patch, each of two pixels at least, because crops are rounded to whole pixels. With
# patches of 4 px, a rounded crop then changes 5 % of the samples, a crop of 32 from 33 pixels 12 %.
SAMPLES = 8
PIXELS_OF_A_SAMPLE = 2
# Share of the samples that may differ: blur and resizing change 2 %, a crop of 224 from 232 pixels 15 %.
TOLERANCE = 0.08
# Height and width of the test images besides the dataset's own; EXIF says that the last one lies on its side.
SHAPES = ((280, 400), (400, 280), (280, 400))
EXIF_ORIENTATION, ON_ITS_SIDE = 0x0112, 6


def check_alignment(dataset: Dataset, grid: tuple[int, int]) -> None:
    """Send test images through a dataset's pipeline, and compare what arrives with what the tokens cover.

    A test image is a pattern of two grey levels, or its negative. Both pass the pipeline with the same random
    draws, so the sign of their difference shows where each pixel came from, whatever became of its colour.
    The tokenizer's view is made by the pipeline that the token store records (without one, it is the largest
    centred part of the grid's shape), or it is the second of two views of an online tokenizer.

    Args:
        dataset: with a `pipeline` that loads images from files.
        grid: `(H, W)` tokens of an image.

    Raises:
        TokenStoreError: image and tokens part, or no test image passes the pipeline.
    """
    load = find_step(dataset.pipeline, LoadTokenGrid)
    pipeline = _probed(dataset.pipeline, grid)
    info = dataset.get_data_info(0)
    view = _tokenizer_view(load.store) if load else None
    reason = "every test image comes out blank"
    num_read = 0
    with own_randomness(), TemporaryDirectory() as folder:
        images = list(_test_images(dataset, grid, Path(folder)))
        for draw in range(DRAWS):
            files = images[draw % len(images)]
            try:
                wrong = _wrong_share(pipeline, view, grid, info, files, draw)
            except Exception as error:  # images of this shape would stop a training, others may pass
                reason = reason_of(error)
                continue
            if wrong is None:
                continue
            num_read += 1
            if wrong > TOLERANCE:
                raise TokenStoreError(
                    f"the pipeline of {type(dataset).__name__} moves pixels and not their tokens: {wrong:.0%}"
                    " of a test image is not what its tokens stand for. Use RandomFlipTokenGrid and "
                    "RandomCropTokenGrid, and cut what the tokenizer saw"
                )
    if not num_read:
        raise TokenStoreError(
            f"no test image passes the pipeline of {type(dataset).__name__} ({reason}): correct it, or set "
            "TokenStoreCheckHook's alignment=False"
        )


def _probed(pipeline: Compose, grid: tuple[int, int]) -> Compose:
    """A copy of a pipeline that reads local files and numbers the tokens of each image."""
    ids = np.arange(grid[0] * grid[1]).reshape(grid)
    replaced: dict[int, Any] = {}
    for step in pipeline_steps(pipeline):
        if isinstance(step, LoadTokenGrid):
            replaced[id(step)] = lambda results: {**results, "token_grid": ids.copy()}
        elif isinstance(step, LoadPicture):  # the test images are grey
            replaced[id(step)] = LoadPicture(bands=[1] * len(step.bands or (1, 2, 3)))
    copied = copy.deepcopy(pipeline, replaced)
    for step in pipeline_steps(copied):
        if isinstance(step, LoadImageFromFile):
            step.backend_args = None
    return copied


def _tokenizer_view(store: TokenStore) -> Compose:
    """The pipeline by which the tokenizer of a store saw the images."""
    if store.preprocessing is not None:
        with DefaultScope.overwrite_default_scope("mmpretrain"):
            steps = [TRANSFORMS.build(step) for step in store.preprocessing["pipeline"]]
        return _probed(Compose(steps), store.grid)

    def largest_centred(results: dict) -> dict:
        height, width = results["img"].shape[:2]
        side = min(height / store.grid[0], width / store.grid[1])
        rows = round(store.grid[0] * side)
        columns = round(store.grid[1] * side)
        top = (height - rows) // 2
        left = (width - columns) // 2
        return {"inputs": results["img"][top : top + rows, left : left + columns]}

    return Compose([LoadImageFromFile(), largest_centred])


def _test_images(dataset: Dataset, grid: tuple[int, int], folder: Path) -> Iterator[tuple[str, str]]:
    """Files of a pattern and its negative, in several shapes."""
    load = find_step(dataset.pipeline, LoadImageFromFile)
    shapes = list(SHAPES)
    with suppress(Exception):  # the first image may be a broken one
        shapes.insert(0, load(dataset.get_data_info(0))["img"].shape[:2])
    for number, shape in enumerate(shapes):
        exif = Image.Exif()
        if number == len(shapes) - 1:
            exif[EXIF_ORIENTATION] = ON_ITS_SIDE
        is_bright = _pattern(shape, grid)
        positive = folder / f"{number}.png"
        negative = folder / f"{number}-negative.png"
        _write(positive, is_bright, exif)
        _write(negative, ~is_bright, exif)
        yield str(positive), str(negative)


def _pattern(shape: tuple[int, int], grid: tuple[int, int]) -> Bool[np.ndarray, "height width"]:
    """Blobs of two sizes in patches: the small ones tell patches apart, the large ones survive blur."""
    height, width = shape
    side = min(height / grid[0], width / grid[1])
    rng = np.random.default_rng(0)
    blobs = np.zeros((height, width), np.float32)
    for size in (0.5, 1.5):
        cells = rng.standard_normal([int(length / (size * side)) + 2 for length in shape])
        blobs += cv2.resize(cells.astype(np.float32), (width, height), interpolation=cv2.INTER_CUBIC)
    return blobs > np.median(blobs)


def _write(path: Path, is_bright: Bool[np.ndarray, "height width"], exif: Image.Exif) -> None:
    dark, bright = LEVELS
    levels = np.where(is_bright, bright, dark).astype(np.uint8)
    Image.fromarray(levels).convert("RGB").save(path, exif=exif)


def _wrong_share(
    pipeline: Compose, view: Compose | None, grid: tuple[int, int], info: dict, files: tuple, seed: int
) -> float | None:
    """Share of the samples that are not what their tokens stand for; None if too few can be read."""
    views, ids = _differences(pipeline, info, files, seed)
    arrived = views[0]
    # What the tokenizer sees, and the place in it that each token stands for.
    if view is not None:
        tokenized = _differences(view, info, files, seed)[0][0]
    elif len(views) == 2:  # of an online tokenizer, whose tokens are as they are made
        tokenized = views[1]
        ids = np.arange(grid[0] * grid[1]).reshape(grid)
    else:
        return 0.0  # one view and no tokens: nothing to compare
    if ids is None:
        return 0.0
    rows, columns = ids.shape
    if arrived.shape[0] * columns != arrived.shape[1] * rows:
        raise ValueError(f"{arrived.shape[0]} x {arrived.shape[1]} px arrive with {rows} x {columns} tokens")
    pixels = min(arrived.shape[0] // rows, tokenized.shape[0] // grid[0])  # per side of a patch
    num_samples = max(1, min(SAMPLES, pixels // PIXELS_OF_A_SAMPLE))
    shown = _samples(arrived, ids.shape, num_samples)
    expected = _samples(tokenized, grid, num_samples)[ids.ravel()]
    readable = _is_readable(shown) & _is_readable(expected)
    if readable.mean() < 0.25:
        return None
    return 1 - _agreement(shown, expected, readable)


def _is_readable(difference: np.ndarray) -> np.ndarray:
    """Where a sample differs enough between an image and its negative to have a sign."""
    size = np.abs(difference)
    return size > 0.1 * size.max()


def _agreement(shown: np.ndarray, expected: np.ndarray, readable: np.ndarray) -> float:
    """Share of the readable samples with the expected sign, in the best of four mirrorings.

    An image that was mirrored with its tokens has mirrored patches. All signs are wrong if the pipeline
    inverted the colours, which moves no pixel.
    """
    best = 0.0
    for vertical, horizontal in product((1, -1), (1, -1)):
        mirrored = expected[:, ::vertical, ::horizontal]
        share = ((shown > 0) == (mirrored > 0))[readable].mean()
        best = max(best, share, 1 - share)
    return float(best)


def _differences(
    pipeline: Compose, info: dict, files: tuple, seed: int
) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Grey differences between two files in each view that a pipeline makes, and the ids that arrive."""
    samples = []
    for file in files:
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        samples.append(pipeline({**copy.deepcopy(info), "img_path": file}))
    positive, negative = (sample.get("inputs", sample.get("img")) for sample in samples)
    if not isinstance(positive, list):  # one view
        positive = [positive]
        negative = [negative]
    differences = [_grey(one) - _grey(other) for one, other in zip(positive, negative, strict=True)]
    ids = samples[0].get("data_samples", samples[0]).get("token_grid")
    return differences, None if ids is None else np.asarray(ids)


def _samples(
    difference: np.ndarray, grid: tuple[int, int], number: int
) -> Float[np.ndarray, "patch row column"]:
    """Each patch of an image in `number` x `number` values."""
    rows, columns = grid
    size = (columns * number, rows * number)
    interpolation = cv2.INTER_AREA if difference.shape[0] > size[1] else cv2.INTER_LINEAR
    small = cv2.resize(difference, size, interpolation=interpolation)
    patches = small.reshape(rows, number, columns, number).transpose(0, 2, 1, 3)
    return patches.reshape(rows * columns, number, number)


def _grey(image: Any) -> Float[np.ndarray, "height width"]:
    values = np.asarray(image, dtype=np.float32)
    if values.ndim == 2:
        return values
    channel_axis = 0 if isinstance(image, Tensor) else 2
    return values.mean(axis=channel_axis)
