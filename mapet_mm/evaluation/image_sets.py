"""The images to evaluate on, and the protocols to run on them, as a config or a folder declares them."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int64
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmengine.utils import to_2tuple
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from mapet_mm.datasets.pipelines import label_of
from mapet_mm.evaluation.folders import ImageSetError, folder_loaders
from mapet_mm.registry import DATASETS
from mapet_mm.utils.config import read_config, scope_of, type_name
from mapet_mm.utils.identity import digest

SECTION = "evaluation"  # of a config
SETS = ("train", "val", "view", "dense_train", "dense_val")  # others are further tests of a classifier


class ImageSet:
    """A dataset of MMPretrain or MMSegmentation with its labels and its identity.

    Args:
        name: one of `SETS`, or of a further test.
        config: as a data loader's: `dataset`, and `batch_size` (64) and `num_workers` (0); `answers` is a
            JSON file with the right classes of each image of ImageNet's `val`, as ReaL's; with `per_class`
            the figure is the mean over classes; other options are ignored.
    """

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.answers, self.per_class = config.get("answers"), config.get("per_class", False)
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


def answers(
    train: ImageSet, test: ImageSet, num_classes: int
) -> tuple[Int64[Tensor, " offered"], Bool[Tensor, "image class"]]:
    """The classes of `train` that a test is between, and which of them are right for each of its images.

    A test with a part of the classes, such as ImageNet-A, is between these; folders named by numbers, as
    ImageNet-V2's, are the classes of these numbers.

    Raises:
        ImageSetError: a class that `train` does not have.
    """
    offered = torch.arange(num_classes)
    if path := getattr(test, "answers", None):
        told = json.loads(Path(path).read_text())
        numbers = [int(re.findall(r"\d+", test.path(index))[-1]) for index in range(len(test))]
        each = [told[number - 1] for number in numbers]  # of ILSVRC2012_val_00000001.JPEG
    else:
        names, known = test.class_names, train.class_names
        if test.name != "val" and names and known and names != known:
            index = {name: place for place, name in enumerate(known)}
            places = [index.get(name, int(name) if name.isdigit() else num_classes) for name in names]
            if wrong := [name for name, place in zip(names, places, strict=True) if place >= num_classes]:
                raise ImageSetError(f"`train` has no class `{wrong[0]}` of the `{test.name}` images")
            offered = torch.tensor(places)
        each = [[int(offered[label])] for label in test.labels]
        offered = offered.sort().values
    right = torch.zeros(len(each), num_classes, dtype=torch.bool)
    for row, classes in zip(right, each, strict=True):
        row[classes] = True
    return offered, right


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
        config: the model's. Its section `evaluation` names the sets, each as a data loader, or their
            `folder`; `view` may be a transform instead, such as `dict(type="RandomFlip", prob=1.0)`, which
            makes a second view of `val`. Without a section, the sets of `knn_probe` are 'train' and
            'val'. Sets without a pipeline take the model's: the one of `val`, or of the test.
        data: another config with such a section, or a folder of `folder_loaders`.

    Raises:
        ImageSetError: no images.
    """
    declared = config if data is None or Path(data).is_dir() else read_config(data)
    loaders = folder_loaders(Path(data)) if declared is config and data else _declared_loaders(declared)
    if not loaders:
        raise ImageSetError(
            f"config {declared.filename} names no images to evaluate on: give it a section `{SECTION}`, "
            "or --data"
        )
    own, step = None, loaders.get("view") if "type" in loaders.get("view", ()) else None
    if step:  # a transform that makes the second view
        loaders["view"] = copy.deepcopy(loaders["val"])
    for name, loader in loaders.items():
        if _plain(loader).get("pipeline") is None:
            own = own or _model_loader(config, str(data or declared.filename))
            loader["dataset"] = dict(loader["dataset"])
            _plain(loader)["pipeline"] = _pipeline_of(own, name.startswith("dense"))
            loaders[name] = {**own, **loader}
    if step:
        _plain(loaders["view"])["pipeline"].insert(-1, step)
    with DefaultScope.overwrite_default_scope(scope_of(declared)):
        return {name: ImageSet(name, loader) for name, loader in loaders.items()}


def _plain(loader: Mapping[str, Any]) -> dict[str, Any]:
    """A loader's dataset, without wrappers."""
    dataset = loader["dataset"]
    while "dataset" in dataset:
        dataset = dataset["dataset"]
    return dataset


def _declared_loaders(config: Config) -> dict[str, Any]:
    """The image sets that a config names."""
    section = dict(config.get(SECTION) or {})
    folder = section.get("folder")
    loaders = folder_loaders(Path(folder)) if folder else {}
    for name, one in section.items():
        if isinstance(one, str) and name != "folder":  # a folder per class
            one = dict(dataset=dict(type="CustomDataset", data_prefix=one))
        if name not in ("folder", "protocols", "version"):
            loaders[name] = one
    probe = config.get("knn_probe") or {}
    return loaders or {
        name: probe[f"{name}_dataloader"] for name in ("train", "val") if f"{name}_dataloader" in probe
    }


def _model_loader(config: Config, data: str) -> Mapping[str, Any]:
    """A loader with the model's own pipeline for a test."""
    loader = _declared_loaders(config).get("val") if config.get(SECTION) or config.get("knn_probe") else None
    if loader is None and scope_of(config) == "mmpretrain":  # others' images have pixel labels or boxes
        loader = config.get("test_dataloader")
    if not loader or not _plain(loader).get("pipeline"):
        raise ImageSetError(
            f"config {config.filename} has no pipeline for the images of {data}: give it a section "
            f"`{SECTION}`, or name a config with one as --data"
        )
    return loader


def _pipeline_of(loader: Mapping[str, Any], dense: bool) -> list[dict[str, Any]]:
    """A model's pipeline; for `dense` images with pixel labels, squashed to the model's size."""
    # Only a pre-training's own images have stored tokens.
    steps = [dict(step) for step in _plain(loader)["pipeline"] if "Token" not in type_name(step["type"])]
    steps[-1].pop("algorithm_keys", None)
    if not dense:
        return steps
    sizes = [step.get("crop_size") or step.get("scale") for step in reversed(steps)]
    size = next((tuple(to_2tuple(one)) for one in sizes if one), None)
    if size is None:
        raise ImageSetError("the model's pipeline has no size, to which images with pixel labels are resized")
    known = next((step for step in steps if "interpolation" in step), {})
    resize = {key: known[key] for key in ("backend", "interpolation") if key in known}
    return [
        dict(type="LoadImageFromFile"),
        dict(type="mmseg.Resize", scale=size, keep_ratio=False, **resize),
        dict(type="mmseg.LoadAnnotations"),
        dict(type="mmseg.PackSegInputs"),
    ]
