"""Look inside datasets: those within wrappers, the steps of their pipelines, the paths of their images."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

from mmengine.dataset import BaseDataset
from torch.utils.data import Dataset

from mapet_mm.structures.image_names import path_of


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
        content, ends = memoryview(dataset.data_bytes), chain([0], dataset.data_address)
        infos = (pickle.loads(content[start:end]) for start, end in pairwise(ends))
    return (path_of(info, dataset) for info in infos)
