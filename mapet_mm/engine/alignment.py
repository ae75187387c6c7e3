"""Find out by trying whether the images that a pipeline gives show what their stored tokens stand for."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from mmcv.transforms import BaseTransform
from mmengine.dataset import Compose, pseudo_collate
from mmengine.registry import DefaultScope
from torch.utils.data import Dataset

from mapet_mm.datasets.transforms import LoadTokenGrid
from mapet_mm.engine.probes import Probe, grey, matching_share, pattern, take_the_place, views_of
from mapet_mm.registry import TRANSFORMS
from mapet_mm.tokenizers.store import TokenStore, TokenStoreError

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

    A probe takes the place of an image of the data set, and numbered ids that of its tokens. Each patch that
    arrives has to match the patch that its id stands for in the tokenizer's view of the same probe better
    than the surroundings a quarter of a patch away. Colours may change, and parts may be erased.

    Args:
        dataset: with a `pipeline` that has `LoadTokenGrid` in it.
        store: says what the tokenizer saw; the largest centred square if it does not record it.
        preprocessor: the model's data preprocessor, if it hands on `[images, token_grids]`.

    Raises:
        TokenStoreError: image and tokens part, or no probe passes the pipeline.
    """
    with _own_randomness():
        pipeline = ProbedPipeline(dataset, dataset.pipeline, store.grid, preprocessor)
        index, arrived = _first_readable(dataset, pipeline)
        if arrived.images is None or arrived.ids is None:
            return
        probes = list(_probes(dataset, store, index, pipeline.size))
        found = _first_misaligned(dataset, pipeline, index, probes)
        if found is None:
            return
        steps = [step for step in _children(dataset.pipeline) if not isinstance(step, LoadTokenGrid)]
        without = [
            ProbedPipeline(dataset, dataset.pipeline, store.grid, preprocessor, step) for step in steps
        ]
        passes = [_passes(dataset, shorter, index, probes) for shorter in without]
        moving = [step for step, passed in zip(steps, passes, strict=True) if passed] or steps
    raise TokenStoreError(
        f"{_describe(moving)} in the pipeline of {type(dataset).__name__} moves pixels but not the grid of "
        f"token store `{store.path}`: of an image of {found.width} x {found.height} px, {found.share:.0%} of "
        "the patches show what their tokens stand for; use RandomFlipTokenGrid or RandomCropTokenGrid after "
        "LoadTokenGrid, and cut what the tokenizer saw (the largest centred square: EfficientNetCenterCrop "
        "with crop_padding=0)"
    )


def pipeline_transforms(step: Any) -> Iterator[Any]:
    """Every transform of a dataset's pipeline in order, also those inside compositions and random choices."""
    inner = _children(getattr(step, "pipeline", step))
    if not inner:
        yield step
    for transform in inner:
        yield from pipeline_transforms(transform)


def _children(step: Any) -> list[Any]:
    """The transforms that a list or another transform holds, whatever the attribute's name."""
    if isinstance(step, list | tuple):
        return list(step)
    if isinstance(step, Compose):
        return list(step.transforms)
    return [value for value in getattr(step, "__dict__", {}).values() if _is_transform(value)]


def _is_transform(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_transform, value))
    return isinstance(value, BaseTransform | Compose)


def _passes(*args: Any) -> bool:
    try:
        return _first_misaligned(*args) is None
    except TokenStoreError:
        return False


def _describe(steps: list[Any]) -> str:
    """Steps in one line, short."""
    words = [" ".join(repr(step).split()) for step in steps]
    named = zip(steps, words, strict=True)
    words = [type(step).__name__ if " at 0x" in said else said for step, said in named]
    if len(words) > 1:
        return ", ".join(said.partition("(")[0] for said in words)
    return words[0] if len(words[0]) < 100 else f"{words[0][:100]} ..."


def _first_misaligned(
    dataset: Dataset, pipeline: ProbedPipeline, index: int, probes: list[Probe]
) -> Misaligned | None:
    """The first draw that is not aligned, or None."""
    probes = list(probes)
    reason, draws, readable = "the tokenizer's own pipeline takes none", 0, 0
    while probes and draws < DRAWS:
        probe = probes[draws % len(probes)]
        try:
            share = _matching(pipeline(index, probe.image), probe)
        except Exception as error:
            # Images of this shape stop a training, too; those of another shape may not.
            reason = f"{type(error).__name__}: {error}".split("\n", 1)[0]
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
    """An image of the data set that passes the pipeline, and what arrives."""
    reason = "the pipeline gives nothing"
    for index in np.unique(np.linspace(0, len(dataset) - 1, 5).astype(int)).tolist():
        try:
            return index, pipeline(index)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".split("\n", 1)[0]
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
    """Probes of all shapes that the tokenizer takes, the data set's own first."""
    if real is None:
        raise TokenStoreError(_untested(dataset, "none of its steps reads an image into `img`"))
    rows, columns = store.grid
    scale = min(real[0] / rows, real[1] / columns)
    own = [real] if scale >= FEWEST_PIXELS or real[0] * columns == real[1] * rows else []
    sizes = [
        (round(rows * side / min(ratio, 1)), round(columns * side * max(ratio, 1))) for side, ratio in SHAPES
    ]
    view = _tokenizer_view(dataset, store, index)
    for size in own + sizes:
        image = pattern(size, min(size[0] / rows, size[1] / columns))
        seen = view(image)
        if seen is not None and seen.shape[0] * columns == seen.shape[1] * rows:
            yield Probe(image, views_of(seen, store.grid))


def _tokenizer_view(
    dataset: Dataset, store: TokenStore, index: int
) -> Callable[[np.ndarray], np.ndarray | None]:
    """What the tokenizer sees of an image, by the pipeline that the store records; None if it refuses it."""
    if store.preprocessing is None:
        return lambda image: _largest_centred(image, store.grid)
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        try:
            steps = [TRANSFORMS.build(step) for step in store.preprocessing["pipeline"]]
        except (KeyError, ImportError) as error:
            raise TokenStoreError(
                f"the tokenizer's pipeline that token store `{store.path}` records cannot be built "
                f"({error}): add the module of its transforms to the config's `custom_imports`"
            ) from None
    pipeline = ProbedPipeline(dataset, Compose(steps), store.grid)

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


class Arrived(NamedTuple):
    """What a pipeline hands on of an image, in grey, and of its tokens; None where it hands on none."""

    images: list[np.ndarray] | None
    ids: np.ndarray | None


class ProbedPipeline:
    """A copy of a pipeline: a probe takes the place of the image, numbered ids that of the tokens.

    Args:
        dataset: gives what the pipeline starts from, a path most of all.
        pipeline: the data set's, or another one.
        grid: (H, W) tokens of an image.
        preprocessor: run after the pipeline, on batches of one.
        without: a step to leave out.

    Attributes:
        size: (H, W) of the image that was read.
    """

    def __init__(
        self,
        dataset: Dataset,
        pipeline: Compose,
        grid: tuple[int, int],
        preprocessor: Callable | None = None,
        without: Any = None,
    ) -> None:
        self.probe: np.ndarray | None = None
        self.size: tuple[int, int] | None = None
        self.preprocessor = preprocessor
        ids = np.arange(grid[0] * grid[1]).reshape(grid)
        replaced: dict[int, Callable] = {}
        for step in pipeline_transforms(pipeline):
            if isinstance(step, LoadTokenGrid):
                replaced[id(step)] = lambda results: {**results, "token_grid": ids.copy()}
            # What reads an image draws nothing, and mmcv has to find what draws in order to share draws.
            elif not hasattr(step, "_methods_with_randomness"):
                replaced[id(step)] = _Reader(step, self._put)
        if without is not None:
            replaced[id(without)] = lambda results: results
        # Replaces them wherever they are referred to, and leaves the states of the others as they are.
        self._steps = copy.deepcopy(pipeline, replaced)
        self._dataset = copy.copy(dataset)
        self._dataset.pipeline = self._run

    def __call__(self, index: int, probe: np.ndarray | None = None) -> Arrived:
        """What arrives of the probe, or of the image itself, at an index of the data set."""
        self.probe = probe
        sample = getattr(self._dataset, "prepare_data", self._dataset.__getitem__)(index)
        if not isinstance(sample, dict):
            raise TypeError(f"it gives {type(sample).__name__}")
        if self.preprocessor is not None:
            images, ids = self.preprocessor(pseudo_collate([sample]), True)["inputs"]
            return Arrived([grey(images[0])], ids[0].cpu().numpy())
        images, ids = (
            sample.get("inputs", sample.get("img")),
            sample.get("data_samples", sample).get("token_grid"),
        )
        views = images if isinstance(images, list | tuple) else [images]
        return Arrived(
            None if images is None else [grey(image) for image in views],
            None if ids is None else np.asarray(ids),
        )

    def _run(self, info: dict) -> Any:
        return self._steps(info if info.get("img") is None else self._put(info))

    def _put(self, results: dict) -> dict:
        image = results["img"]
        if self.probe is None:
            self.size = grey(image).shape
        else:
            results["img"] = take_the_place(image, self.probe)
            results.update({key: self.probe.shape for key in ("img_shape", "ori_shape") if key in results})
        return results


class _Reader:
    """A step of a pipeline; if it turns out to read the image, it does so once."""

    def __init__(self, step: Callable, put: Callable[[dict], dict]) -> None:
        try:
            self.step = copy.deepcopy(step)
        except Exception:  # it holds what cannot be copied, an open file for example
            self.step = step
        self.put = put
        self.read: dict | None = None

    def __call__(self, results: Any) -> Any:
        if not isinstance(results, dict) or results.get("img") is not None:
            return self.step(results)
        if self.read is None:
            results = self.step(results)
            if results is None or results.get("img") is None:
                return results
            self.read = dict(results)
        return self.put({**self.read, **results, "img": self.read["img"]})


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
