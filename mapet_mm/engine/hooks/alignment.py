"""Find out by trying whether the images that a pipeline gives show what their stored tokens stand for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from mapet_mm.datasets.transforms.token_grid import LoadTokenGrid
from mapet_mm.engine.hooks.alignment_patterns import Probe, matching_share, pattern, views_of
from mapet_mm.engine.hooks.photos import first_turned
from mapet_mm.engine.hooks.probed_pipeline import (
    Arrived,
    ProbedPipeline,
    children,
    pipeline_transforms,
    recorded_pipeline,
)
from mapet_mm.structures import TokenStore, TokenStoreError
from mapet_mm.structures.image_names import path_of
from mapet_mm.utils.errors import reason_of

# A step that moves pixels with probability 0.1 is missed once in 850 runs.
DRAWS = 64
# Of the probes: pixels per patch, and width over height.
SHAPES = ((20, 1.0), (20, 4 / 3), (20, 3 / 4), (10, 3 / 2), (28, 2 / 3), (16, 5 / 2))
# Images smaller than this are cut by whole pixels that are a good part of a patch.
FEWEST_PIXELS = 8
# Share of the patches that have to match: nearly all do, a ninth by chance; erased and blurred ones need not.
ALIGNED = 0.35


class Misaligned(NamedTuple):
    """A draw in which too few patches showed what their tokens stand for."""

    share: float
    height: int
    width: int


def check_alignment(dataset: Dataset, store: TokenStore, preprocessor: Callable | None = None) -> None:
    """Send probe images through a dataset's pipeline and compare what arrives with what the tokens cover.

    A probe takes the place of an image of the dataset, and numbered ids that of its tokens. Each patch that
    arrives has to match the patch that its id stands for in the tokenizer's view of the same probe better
    than the surroundings a quarter of a patch away. Colours may change, and parts may be erased. Of the step
    that reads the images, whose place the probes take, a photo in a file shows whether it turns photos by
    their EXIF orientation as the tokenizer's did; that matters if there are such photos.

    Args:
        dataset: with a `pipeline` that has `LoadTokenGrid` in it.
        store: says what the tokenizer saw; the largest centred square if it does not record it.
        preprocessor: the model's data preprocessor, if it hands on `[images, token_grids]`.

    Raises:
        TokenStoreError: image and tokens part, also of photos alone, or no probe passes the pipeline.
    """
    with _own_randomness():
        pipeline = ProbedPipeline(dataset, dataset.pipeline, store.grid, preprocessor)
        index, arrived = _first_readable(dataset, pipeline)
        if arrived.images is None or arrived.ids is None:
            return
        _check_photos(dataset, store, pipeline, index)
        probes = list(_probes(dataset, store, index, pipeline.size))

        def share(pipeline: ProbedPipeline, probe: Probe) -> float | None:
            return _matching(pipeline(index, probe.image), probe)

        found = _first_misaligned(dataset, partial(share, pipeline), probes)
        if found is None:
            return
        steps = [step for step in children(dataset.pipeline) if not isinstance(step, LoadTokenGrid)]
        moving = _culprits(dataset, store.grid, preprocessor, steps, share, probes)
    raise TokenStoreError(
        f"{_describe(moving)} in the pipeline of {type(dataset).__name__} moves pixels but not the grid of "
        f"token store `{store.path}`: of an image of {found.width} x {found.height} px, {found.share:.0%} of "
        "the patches show what their tokens stand for; use RandomFlipTokenGrid or RandomCropTokenGrid after "
        "LoadTokenGrid, and cut what the tokenizer saw (the largest centred square: EfficientNetCenterCrop "
        "with crop_padding=0)"
    )


def check_views(dataset: Dataset, grid: tuple[int, int]) -> None:
    """Send probe images through a pipeline of two views, the model's and the tokenizer's, and compare these.

    Args:
        dataset: with a `pipeline` that gives two views of each image.
        grid: (H, W) tokens that the tokenizer makes of its view.

    Raises:
        TokenStoreError: the views part, or no probe passes the pipeline.
    """
    ids = np.arange(grid[0] * grid[1]).reshape(grid)
    with _own_randomness():
        pipeline = ProbedPipeline(dataset, dataset.pipeline, grid)
        index, arrived = _first_readable(dataset, pipeline)
        if arrived.images is None or len(arrived.images) != 2 or pipeline.size is None:
            return
        probes = [Probe(image, None) for image in _patterns(grid, pipeline.size)]

        def share(pipeline: ProbedPipeline, probe: Probe) -> float | None:
            image, seen = pipeline(index, probe.image).images
            return matching_share(image, ids, views_of(seen, grid))

        found = _first_misaligned(dataset, partial(share, pipeline), probes)
        if found is None:
            return
        # MultiView holds each of its steps in two lists.
        steps = list({id(step): step for step in pipeline_transforms(dataset.pipeline)}.values())
        moving = _culprits(dataset, grid, None, steps, share, probes)
    raise TokenStoreError(
        f"{_describe(moving)} in the pipeline of {type(dataset).__name__} moves pixels in one of an image's "
        "two views and not in the other, whose tokens are predicted: of an image of "
        f"{found.width} x {found.height} px, {found.share:.0%} of the patches match; move both views "
        "together, before MultiView"
    )


def _culprits(
    dataset: Dataset,
    grid: tuple[int, int],
    preprocessor: Callable | None,
    steps: list[Any],
    share: Callable[[ProbedPipeline, Probe], float | None],
    probes: list[Probe],
) -> list[Any]:
    """The steps without which a pipeline is aligned; all of them if there are none."""
    without = [ProbedPipeline(dataset, dataset.pipeline, grid, preprocessor, step) for step in steps]
    passes = [_passes(dataset, partial(share, shorter), probes) for shorter in without]
    return [step for step, passed in zip(steps, passes, strict=True) if passed] or steps


def _check_photos(dataset: Dataset, store: TokenStore, pipeline: ProbedPipeline, index: int) -> None:
    """Refuse a loading step that turns photos, or leaves them, unlike the tokenizer's, if there are any.

    Looking for one reads the head of each file, so this is done only where the steps differ.
    """
    if store.preprocessing is None:
        return
    recorded = recorded_pipeline(dataset, store)
    with suppress(Exception):  # it may need more than this dataset says of an image
        recorded(index)
    turned = pipeline.turns_photos(), recorded.turns_photos()
    if None in turned or turned[0] == turned[1]:
        return
    numbers = tqdm(range(len(dataset)), desc="looking for turned photos", unit="image", delay=2)
    if photo := first_turned(path_of(dataset.get_data_info(number), dataset) for number in numbers):
        does, saw = ("turns", "as they lie in their files") if turned[0] else ("does not turn", "upright")
        raise TokenStoreError(
            f"{_words(pipeline.loading)} in the pipeline of {type(dataset).__name__} {does} photos by their "
            f"EXIF orientation, but the tokenizer of token store `{store.path}` saw them {saw}, and {photo}: "
            f"load images as the store records, by {_words(recorded.loading)}"
        )


def _words(step: Any) -> str:
    words = " ".join(repr(step).split())
    return type(step).__name__ if " at 0x" in words else words


def _passes(*args: Any) -> bool:
    try:
        return _first_misaligned(*args) is None
    except TokenStoreError:
        return False


def _describe(steps: list[Any]) -> str:
    """Steps in one line, short."""
    words = list(map(_words, steps))
    if len(words) > 1:
        return ", ".join(said.partition("(")[0] for said in words)
    return words[0] if len(words[0]) < 100 else f"{words[0][:100]} ..."


def _first_misaligned(
    dataset: Dataset, share_of: Callable[[Probe], float | None], probes: list[Probe]
) -> Misaligned | None:
    """The first draw in which too small a share of the patches matches, or None."""
    probes = list(probes)
    reason, draws, readable = "the tokenizer's own pipeline takes none", 0, 0
    while probes and draws < DRAWS:
        probe = probes[draws % len(probes)]
        try:
            share = share_of(probe)
        except Exception as error:
            # Images of this shape stop a training, too; those of another shape may not.
            reason = reason_of(error)
            del probes[draws % len(probes)]
            continue
        if share is not None and share < ALIGNED:
            return Misaligned(share, *probe.image.shape)
        draws, readable = draws + 1, readable + (share is not None)
    if not readable:
        raise TokenStoreError(_untested(dataset, reason if not probes else "all come out blank"))
    return None


def _untested(dataset: Dataset, reason: str) -> str:
    return (
        f"no probe image passes the pipeline of {type(dataset).__name__} ({reason}), so that nobody knows "
        "whether images and token grids are aligned: correct the pipeline, or set TokenStoreCheckHook's "
        "alignment=False"
    )


def _first_readable(dataset: Dataset, pipeline: ProbedPipeline) -> tuple[int, Arrived]:
    """An image of the dataset that passes the pipeline, and what arrives."""
    reason = "the pipeline gives nothing"
    for index in np.unique(np.linspace(0, len(dataset) - 1, 5).astype(int)).tolist():
        try:
            return index, pipeline(index)
        except Exception as error:
            reason = reason_of(error)
    raise TokenStoreError(_untested(dataset, reason))


def _matching(arrived: Arrived, probe: Probe) -> float | None:
    """Share of the patches that match their ids, in an image's worst view; None if no view is readable."""
    rows, columns = arrived.ids.shape
    if arrived.ids.min() < 0 or arrived.ids.max() >= probe.views.shape[-2]:
        raise ValueError("the pipeline changes the token ids")
    for image in arrived.images:
        if image.shape[0] * columns != image.shape[1] * rows:
            raise ValueError(f"{image.shape[0]} x {image.shape[1]} px arrive with {rows} x {columns} tokens")
    shares = [matching_share(image, arrived.ids, probe.views) for image in arrived.images]
    return min((share for share in shares if share is not None), default=None)


def _probes(dataset: Dataset, store: TokenStore, index: int, real: tuple[int, int] | None) -> Iterator[Probe]:
    """Probes of all shapes that the tokenizer takes, the dataset's own first."""
    if real is None:
        raise TokenStoreError(_untested(dataset, "none of its steps reads an image into `img`"))
    view = _tokenizer_view(dataset, store, index)
    for image in _patterns(store.grid, real):
        seen = view(image)
        if seen is not None and seen.shape[0] * store.grid[1] == seen.shape[1] * store.grid[0]:
            yield Probe(image, views_of(seen, store.grid))


def _patterns(grid: tuple[int, int], real: tuple[int, int]) -> Iterator[np.ndarray]:
    """Patterns of all shapes, that of the dataset's own images first."""
    rows, columns = grid
    scale = min(real[0] / rows, real[1] / columns)
    own = [real] if scale >= FEWEST_PIXELS or real[0] * columns == real[1] * rows else []
    sizes = [
        (round(rows * side / min(ratio, 1)), round(columns * side * max(ratio, 1))) for side, ratio in SHAPES
    ]
    for size in own + sizes:
        yield pattern(size, min(size[0] / rows, size[1] / columns))


def _tokenizer_view(
    dataset: Dataset, store: TokenStore, index: int
) -> Callable[[np.ndarray], np.ndarray | None]:
    """What the tokenizer sees of an image, by the pipeline that the store records; None if it refuses it."""
    if store.preprocessing is None:
        return lambda image: _largest_centred(image, store.grid)
    pipeline = recorded_pipeline(dataset, store)

    def view(image: np.ndarray) -> np.ndarray | None:
        try:
            return pipeline(index, image).images[0]
        except Exception:
            return None

    return view


def _largest_centred(image: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """The largest centred part of an image with the grid's aspect ratio: a square for a square grid."""
    side = min(image.shape[0] / grid[0], image.shape[1] / grid[1])
    height, width = round(grid[0] * side), round(grid[1] * side)
    top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
    return image[top : top + height, left : left + width]


@contextmanager
def _own_randomness() -> Iterator[None]:
    """Random states that are the same in every run, and the caller's again afterwards."""
    python, numbers, devices = random.getstate(), np.random.get_state(), []
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices = [torch.cuda.current_device()]
    with torch.random.fork_rng(devices=devices):
        random.seed(0)
        np.random.seed(0)
        torch.default_generator.manual_seed(0)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)
