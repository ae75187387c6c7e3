"""The datasets of a loader with their pipelines, those that they have and those that hooks will set."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from mmengine.dataset import Compose
from mmengine.hooks import Hook
from mmpretrain.engine import SwitchRecipeHook
from torch.utils.data import Dataset

from mapet_mm.datasets.transforms.token_grid import LoadTokenGrid
from mapet_mm.engine.hooks.probed_pipeline import pipeline_transforms


class Case(NamedTuple):
    """A dataset with a pipeline, its own or one to come, and where the config has that one."""

    dataset: Dataset
    pipeline: Any
    where: str | None = None


def leaf_datasets(dataset: Dataset) -> Iterator[Dataset]:
    """The datasets with a pipeline inside wrappers (repeat, concatenation, subset, class balance, seeds)."""
    if hasattr(dataset, "pipeline"):
        inner = _passed_on(dataset)
        yield from [dataset] if inner is None else leaf_datasets(inner)
    elif hasattr(dataset, "datasets"):
        for inner in dataset.datasets:
            yield from leaf_datasets(inner)
    elif hasattr(dataset, "dataset"):
        yield from leaf_datasets(dataset.dataset)


def _passed_on(dataset: Dataset) -> Dataset | None:
    """The dataset whose attributes a wrapper gives as its own (seeds, MMEngine's `num_batch_per_epoch`)."""
    if "pipeline" in vars(dataset):
        return None
    parts = [one for one in vars(dataset).values() if hasattr(one, "pipeline")]
    return next((one for one in parts if one.pipeline is dataset.pipeline), None)


def load_of(pipeline: Any) -> LoadTokenGrid | None:
    """The step that loads the tokens, in a pipeline or in a dataset's."""
    return next((step for step in pipeline_transforms(pipeline) if isinstance(step, LoadTokenGrid)), None)


def cases_of(dataset: Dataset, where: str | None = None) -> Iterator[Case]:
    """The datasets inside wrappers with their own pipelines."""
    return (Case(leaf, leaf.pipeline, where) for leaf in leaf_datasets(dataset))


def pipelines_to_come(hooks: Iterable[Hook]) -> Iterator[tuple[str, Any]]:
    """What hooks will make the training set's pipeline in some epoch, and where the config has it."""
    for hook in hooks:
        if isinstance(hook, SwitchRecipeHook):
            for epoch, recipe in hook.schedule.items():
                if "train_pipeline" in recipe:
                    yield f"SwitchRecipeHook's train_pipeline of epoch {epoch}", recipe["train_pipeline"]
        elif getattr(hook, "switch_pipeline", None):  # of MMDetection and MMYOLO
            yield f"{type(hook).__name__}'s switch_pipeline", Compose(hook.switch_pipeline)


def with_pipeline(dataset: Dataset, pipeline: Any) -> Dataset:
    """A copy of the dataset that shares its images."""
    dataset = copy.copy(dataset)
    dataset.pipeline = pipeline
    return dataset
