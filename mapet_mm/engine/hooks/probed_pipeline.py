"""A dataset's pipeline with probes in the place of its images, and numbers in that of their tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from mmcv.transforms import BaseTransform
from mmcv.transforms import Compose as ComposeTransform
from mmengine.dataset import Compose, pseudo_collate
from mmengine.registry import DefaultScope
from torch.utils.data import Dataset

from mapet_mm.datasets.transforms.token_grid import LoadTokenGrid
from mapet_mm.engine.hooks.alignment_patterns import grey, take_the_place
from mapet_mm.engine.hooks.photos import turns_photos
from mapet_mm.registry import TRANSFORMS
from mapet_mm.structures import TokenStore, TokenStoreError


class Arrived(NamedTuple):
    """What a pipeline hands on of an image, in grey, and of its tokens; None where it hands on none."""

    images: list[np.ndarray] | None
    ids: np.ndarray | None


class ProbedPipeline:
    """A copy of a pipeline: a probe takes the place of the image, numbered ids that of the tokens.

    Args:
        dataset: gives what the pipeline starts from, a path most of all.
        pipeline: the dataset's, or another one.
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
        self._readers: list[_Reader] = []
        ids = np.arange(grid[0] * grid[1]).reshape(grid)
        replaced: dict[int, Callable] = {}
        for step in pipeline_transforms(pipeline):
            if isinstance(step, LoadTokenGrid):
                replaced[id(step)] = lambda results: {**results, "token_grid": ids.copy()}
            # What reads an image draws nothing, and mmcv has to find what draws in order to share draws.
            elif not hasattr(step, "_methods_with_randomness"):
                self._readers.append(_Reader(step, self._put))
                replaced[id(step)] = self._readers[-1]
        if without is not None:
            replaced[id(without)] = lambda results: results
        # Replaces them wherever they are referred to, and leaves the states of the others as they are.
        self._steps = copy.deepcopy(pipeline, replaced)
        self._dataset = copy.copy(dataset)
        self._dataset.pipeline = self._run

    def __call__(self, index: int, probe: np.ndarray | None = None) -> Arrived:
        """What arrives of the probe, or of the image itself, at an index of the dataset."""
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

    @property
    def loading(self) -> Callable | None:
        """The step that has read the images."""
        return None if self._reader is None else self._reader.step

    def turns_photos(self) -> bool | None:
        """Whether photos are read upright, as EXIF asks; None as long as nothing is read from files."""
        if (reader := self._reader) is None:
            return None
        return turns_photos(reader.step, {key: reader.read[key] for key in reader.read.keys() - {"img"}})

    @property
    def _reader(self) -> _Reader | None:
        return next((reader for reader in self._readers if reader.read is not None), None)

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


def recorded_pipeline(dataset: Dataset, store: TokenStore) -> ProbedPipeline:
    """The pipeline that a token store records, by which the tokenizer saw the images.

    Args:
        dataset: gives what the pipeline starts from.
        store: with a record.

    Raises:
        TokenStoreError: a step of the pipeline is not registered.
    """
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        try:
            steps = [TRANSFORMS.build(step) for step in store.preprocessing["pipeline"]]
        except (KeyError, ImportError) as error:
            raise TokenStoreError(
                f"the tokenizer's pipeline that token store `{store.path}` records cannot be built "
                f"({error}): add the module of its transforms to the config's `custom_imports`"
            ) from None
    return ProbedPipeline(dataset, Compose(steps), store.grid)


def pipeline_transforms(step: Any) -> Iterator[Any]:
    """Every transform of a dataset's pipeline in order, also those inside compositions and random choices."""
    inner = children(getattr(step, "pipeline", step))
    if not inner:
        yield step
    for transform in inner:
        yield from pipeline_transforms(transform)


def children(step: Any) -> list[Any]:
    """The transforms that a list or another transform holds, whatever the attribute's name."""
    if isinstance(step, list | tuple):
        return list(step)
    if isinstance(step, Compose | ComposeTransform):  # the latter where a hook has set the pipeline
        return list(step.transforms)
    return [value for value in getattr(step, "__dict__", {}).values() if _is_transform(value)]


def _is_transform(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_transform, value))
    return isinstance(value, BaseTransform | Compose)


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
