"""The images to evaluate on, and the protocols to run on them, as a config or a folder declares them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from mmengine.config import Config, ConfigDict
from mmengine.registry import DefaultScope
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from mapet_mm.registry import DATASETS
from mapet_mm.structures.image_names import label_of
from mapet_mm.utils.config import read_config, scope_of, type_name
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.identity import digest

SECTION = "evaluation"  # of a config


class ImageSetError(UserError):
    """Images or labels that the evaluation cannot use."""


class ImageSet:
    """A dataset of MMPretrain or MMSegmentation with its labels and its identity.

    Args:
        name: 'train', 'val', 'dense_train' or 'dense_val'.
        config: as a data loader's: `dataset`, and `batch_size` (64) and `num_workers` (0); other options are
            ignored.
    """

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.name, self.config = name, config["dataset"]
        self.batch_size, self.num_workers = config.get("batch_size", 64), config.get("num_workers", 0)
        self.dataset: Dataset = DATASETS.build(config["dataset"])

    def __len__(self) -> int:
        return len(self.dataset)

    def path(self, index: int) -> str:
        """Path of an image; its number in a dataset that holds the images themselves."""
        return self._images[index][0]

    @cached_property
    def labels(self) -> Int64[Tensor, " image"] | None:
        """Class of each image; None for images without labels, or with several each."""
        labels = [label for _, label in self._images]
        return None if None in labels else torch.tensor(labels)

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes by index, if the dataset knows them."""
        classes = getattr(self.dataset, "metainfo", {}).get("classes")
        return None if classes is None else [str(name) for name in classes]

    @cached_property
    def digest(self) -> str:
        """Digest of the dataset's config and each image's path, label, file size and mtime."""
        known = hashlib.sha256(digest(self.config).encode())
        for path, label in self._images:
            known.update(f"{path}|{label}|{_size_and_time(path)}\n".encode())
        return known.hexdigest()

    @cached_property
    def _images(self) -> list[tuple[str, int | None]]:
        """Path and label of each image."""
        indices = tqdm(range(len(self)), desc=f"reading names of {self.name}", unit="image", delay=2)
        infos = (self.dataset.get_data_info(index) for index in indices)
        return [
            (str(info.get("img_path") or f"number {index}"), label_of(info))
            for index, info in enumerate(infos)
        ]


def _size_and_time(path: str) -> tuple[int, int] | None:
    """Size and mtime of a file; None for images elsewhere."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def check_labels(train: ImageSet, val: ImageSet) -> int:
    """The number of classes of two image sets that a classifier is trained and tested on.

    Raises:
        ImageSetError: images without labels or with one below 0, one class only, a class of `val` or of the
            dataset without an image in `train`, or classes in another order.
    """
    for images in (train, val):
        if images.labels is None or images.labels.min() < 0:
            raise ImageSetError(
                f"the `{images.name}` images have no labels, or some have none: leave them out, or choose "
                "protocols that need no labels"
            )
    check_class_names(train, val)
    classes = set(train.labels.tolist())
    if len(classes) < 2:
        raise ImageSetError(f"`train` contains only class {classes.pop()}: classification needs two")
    wanted = {*val.labels.tolist(), *range(len(train.class_names or ()))}
    if missing := sorted(wanted - classes):
        raise ImageSetError(f"`train` has no image of class {missing[0]}: add some, or leave the class out")
    return max(classes) + 1


def check_class_names(train: ImageSet, val: ImageSet) -> None:
    """Raise ImageSetError if an index means different classes in two sets that name their classes."""
    pairs = zip(train.class_names or (), val.class_names or (), strict=False)  # the last ones may be missing
    for index, (known, other) in enumerate(pairs):
        if known != other:
            raise ImageSetError(
                f"class {index} is `{known}` in the `{train.name}` images and `{other}` in the `{val.name}` "
                "images: add the class folder that is missing, or give both sets the same "
                "`metainfo=dict(classes=[...])`"
            )


def read_image_sets(config: Config, data: str | None = None) -> dict[str, ImageSet]:
    """The image sets of a config, or of `data` instead.

    Args:
        config: the model's config. Its section `evaluation` names the sets, each as a data loader; without
            one, the sets of `knn_probe` are 'train' and 'val'.
        data: another config with such a section; or a folder with `train` and `val`, to which the pipeline of
            the model's config is applied.

    Raises:
        ImageSetError: no images.
    """
    declared = config
    if data is not None and Path(data).is_dir():
        loaders = _folder_loaders(config, Path(data))
    else:
        declared = config if data is None else read_config(data)
        loaders = _declared_loaders(declared)
        if not loaders:
            raise ImageSetError(
                f"config {declared.filename} names no images to evaluate on: give it a section `{SECTION}`, "
                "or --data"
            )
    with DefaultScope.overwrite_default_scope(scope_of(declared)):
        return {name: ImageSet(name, loader) for name, loader in loaders.items()}


def _declared_loaders(config: Config) -> dict[str, Any]:
    """The image sets that a config names."""
    section = {name: loader for name, loader in (config.get(SECTION) or {}).items() if name != "protocols"}
    probe = config.get("knn_probe") or {}
    return section or {
        name: probe[f"{name}_dataloader"] for name in ("train", "val") if f"{name}_dataloader" in probe
    }


def _folder_loaders(config: Config, folder: Path) -> dict[str, Any]:
    loaders = _declared_loaders(config)
    if not loaders and scope_of(config) == "mmpretrain":  # other libraries' images have pixel labels or boxes
        loaders = {"val": config.get("test_dataloader")}
    if not loaders.get("val"):
        raise ImageSetError(
            f"config {config.filename} has no pipeline for the images in {folder}: give it a section "
            f"`{SECTION}`, or name a config with one as --data"
        )
    steps = loaders["val"].dataset.pipeline  # only a pre-training's own images have stored tokens
    pipeline = [dict(step) for step in steps if "Token" not in type_name(step["type"])]
    pipeline[-1].pop("algorithm_keys", None)
    made = {}
    for name in ("train", "val"):
        if not (folder / name).is_dir():
            raise ImageSetError(f"{folder} has no folder `{name}`: it takes `train` and `val`")
        with_label = any(path.is_dir() for path in (folder / name).iterdir())  # a folder per class
        known = dict(data_root=str(folder), data_prefix=name, pipeline=pipeline, with_label=with_label)
        made[name] = ConfigDict(loaders["val"], dataset=dict(type="CustomDataset", **known))
    return made
