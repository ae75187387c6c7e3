"""Look inside datasets: those within wrappers, the steps of their pipelines, the paths of their images."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from mmengine.dataset import BaseDataset
from torch.utils.data import Dataset

from mapet_mm.utils.errors import UserError


def leaf_datasets(dataset: Dataset) -> Iterator[Dataset]:
    """The datasets inside wrappers (seeds, repeat, concatenation, subset, class balance)."""
    if hasattr(dataset, "datasets"):
        for inner in dataset.datasets:
            yield from leaf_datasets(inner)
    elif hasattr(dataset, "dataset"):
        yield from leaf_datasets(dataset.dataset)
    else:
        yield dataset


def pipeline_steps(step: Any) -> Iterator[Any]:
    """Every step of a pipeline in order, also inside compositions, random choices and views."""
    inner = step if isinstance(step, list | tuple) else getattr(step, "transforms", ())
    if not isinstance(inner, list | tuple):
        inner = (inner,)
    if not inner:
        yield step
    for one in inner:
        yield from pipeline_steps(one)


def find_step(pipeline: Any, kind: type) -> Any:
    """The first step of a type in a pipeline; None without one."""
    return next((step for step in pipeline_steps(pipeline) if isinstance(step, kind)), None)


def image_paths(dataset: Dataset) -> Iterator[str]:
    """Paths of a dataset's images in its order, one by one.

    Raises:
        UserError: the images have no paths.
    """
    infos = map(dataset.get_data_info, range(len(dataset)))
    plain = getattr(type(dataset), "get_data_info", None) is BaseDataset.get_data_info
    if plain and dataset.serialize_data and len(dataset):  # a million in half the time
        content = memoryview(dataset.data_bytes)
        ends = chain([0], dataset.data_address)
        infos = (pickle.loads(content[start:end]) for start, end in pairwise(ends))
    return (path_of(info, dataset) for info in infos)


def path_of(info: Mapping[str, Any], dataset: object) -> str:
    """Path of a dataset's image, from its `get_data_info`; UserError if the dataset holds images itself."""
    path = info.get("img_path")
    if path:
        return path
    raise UserError(
        f"images of {type(dataset).__name__} have no `img_path`: tokens are stored by an image's path, so "
        "write the images into a folder first"
    )


def label_of(info: Mapping[str, Any]) -> int | None:
    """Class index of an image of a dataset, from what its `get_data_info` says; None unless it is one."""
    labels = np.atleast_1d(info.get("gt_label"))
    is_index = labels.size == 1 and labels.dtype.kind in "iu"
    return int(labels[0]) if is_index else None


@contextmanager
def own_randomness() -> Iterator[None]:
    """Leave the random states as they were."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
