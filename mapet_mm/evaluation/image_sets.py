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

import numpy as np
import torch
from jaxtyping import Bool, Int64
from mmcv.transforms import LoadImageFromFile
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmengine.utils import to_2tuple
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from mapet_mm.datasets.building import build_dataset
from mapet_mm.datasets.pipelines import label_of, leaf_datasets
from mapet_mm.evaluation.folders import ImageSetError, class_loaders, folder_loaders
from mapet_mm.tokenizers.images import ImageReader
from mapet_mm.utils.config import read_config, scope_of, type_name
from mapet_mm.utils.dist import print_once
from mapet_mm.utils.errors import listed
from mapet_mm.utils.identity import digest, tar_of
from mapet_mm.utils.loader_workers import default_workers

SECTION = "evaluation"  # of a config
NO_SETS = ("folder", "folders", "per_class", "protocols", "version")  # its other entries
NAMED_FILES = ("ann_file", "store", "left_out", "groups")  # by a dataset: lists of images, a token store
SETS = ("train", "val", "view", "dense_train", "dense_val")  # others are further tests of a classifier


class ImageSet:
    """A dataset of MMPretrain or MMSegmentation with its labels and its identity.

    Two sets with the same config of the dataset and the same files are equal.

    Args:
        name: one of `SETS`, or of a further test.
        config: as a data loader's: `dataset`, and `batch_size` (64) and `num_workers` (up to 8); `answers` is
            a JSON file with the right classes of each image of ImageNet's `val`, as ReaL's; with `per_class`
            the figure is the mean over classes; other options are ignored.
    """

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.name = name
        self.config = config["dataset"]
        self.batch_size = config.get("batch_size", 64)
        self.num_workers = config.get("num_workers", default_workers())
        self.answers = config.get("answers")
        self.per_class = config.get("per_class", False)
        self.dataset: Dataset = build_dataset(config["dataset"])
        for leaf in leaf_datasets(self.dataset):
            steps = getattr(getattr(leaf, "pipeline", None), "transforms", ())
            if steps and isinstance(steps[0], LoadImageFromFile):
                steps[0] = ImageReader(steps[0])
        self.files: list[str] = []
        self._labels: list[int | None] = []
        self._groups: list[str | None] = []
        for number in tqdm(range(len(self.dataset)), f"reading names of {name}", unit="image", delay=2):
            info = self.dataset.get_data_info(number)
            self.files.append(str(info.get("img_path") or f"number {number}"))
            self._labels.append(label_of(info))
            self._groups.append(info.get("group"))
        self.left_out: dict[int, str] = {}  # images that cannot be decoded, with the reason
        self.shown = np.arange(len(self.files))  # the others

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ImageSet) and (self.digest, self.left_out) == (other.digest, other.left_out)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __len__(self) -> int:
        return len(self.shown)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """What the pipeline gives of an image."""
        return self.dataset[int(self.shown[index])]

    def leave_out(self, reasons: Mapping[int, str]) -> None:
        """Leave images out from now on, by their numbers in the dataset, and name them, with the reasons."""
        found = {number: reason for number, reason in reasons.items() if number not in self.left_out}
        if not found:
            return
        few = [f"{self.files[number]} ({reason})" for number, reason in found.items()]
        print_once(
            f"left {len(found)} of {len(self.files)} `{self.name}` images out that could not be decoded: "
            f"{listed(few, most=5)}"
        )
        self.left_out.update(found)
        self.shown = np.delete(np.arange(len(self.files)), list(self.left_out))
        for name in ("labels", "groups"):
            self.__dict__.pop(name, None)

    def path(self, index: int) -> str:
        """Path of an image; its number in a dataset that holds the images themselves."""
        return self.files[self.shown[index]]

    @cached_property
    def labels(self) -> Int64[Tensor, " image"] | None:
        """Class of each image; None for images without labels, or with several each."""
        return None if None in self._labels else torch.tensor(self._labels)[self.shown]

    @cached_property
    def groups(self) -> Int64[Tensor, " image"] | None:
        """Number of each image's group, if the dataset names groups; see `ImageFolder`."""
        if None in self._groups or not self._groups:
            return None
        number = {group: index for index, group in enumerate(dict.fromkeys(self._groups))}
        return torch.tensor([number[group] for group in self._groups])[self.shown]

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes by index, if the dataset knows them."""
        classes = getattr(self.dataset, "metainfo", {}).get("classes")
        return None if classes is None else [str(name) for name in classes]

    @cached_property
    def digest(self) -> str:
        """Digest of the dataset's config and each image's path, label, file size and mtime.

        Images that are left out count as well: a file that is repaired has another time.
        """
        known = hashlib.sha256(digest(self.config).encode())
        for path, label in zip(self.files, self._labels, strict=True):
            line = f"{path}|{label}|{_size_and_time(path)}\n"
            known.update(line.encode("utf-8", "surrogateescape"))  # names may be no UTF-8
        return known.hexdigest()


def useful_workers(images: ImageSet, num_images: int) -> int:
    """How many processes load some images of a set: none for one batch, and at most one for each."""
    num_batches = -(-num_images // images.batch_size)
    return min(images.num_workers, num_batches) if num_batches > 1 else 0


def _size_and_time(path: str) -> tuple[int, int] | None:
    """Size and mtime of an image's file, or of the tar file that it is in; None for images elsewhere."""
    try:
        found = os.stat(path)
    except OSError:
        tar_file = tar_of(path)
        if tar_file is None:
            return None
        found = tar_file.stat()
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
    missing = wanted - classes
    if missing:
        raise ImageSetError(f"`train` has no image of class {min(missing)}: add some, or leave the class out")
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
    path = getattr(test, "answers", None)
    if path:
        offered = torch.arange(num_classes)
        right = torch.zeros(len(test), num_classes, dtype=torch.bool)
        listed = json.loads(Path(path).read_text())
        for index in range(len(test)):
            number = int(re.findall(r"\d+", test.path(index))[-1])  # of ILSVRC2012_val_00000001.JPEG
            right[index, listed[number - 1]] = True
    else:
        class_of = torch.tensor(classes_in_train(train, test, num_classes))
        offered = class_of.sort().values
        right = torch.zeros(len(test.labels), num_classes, dtype=torch.bool)
        right[torch.arange(len(test.labels)), class_of[test.labels]] = True
    return offered, right


def classes_in_train(train: ImageSet, test: ImageSet, num_classes: int) -> list[int]:
    """The class of `train` that each class of a test is: of the same name, or of the number in its name."""
    names = test.class_names
    known = train.class_names
    if test.name == "val" or not names or not known or names == known:
        return list(range(num_classes))
    index_of = {name: index for index, name in enumerate(known)}
    classes = []
    for name in names:
        index = index_of.get(name, int(name) if name.isdigit() else num_classes)
        if index >= num_classes:
            raise ImageSetError(f"`train` has no class `{name}` of the `{test.name}` images")
        classes.append(index)
    return classes


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


def read_image_sets(
    config: Config,
    data: str | None = None,
    labels: str | None = None,
    class_level: int | None = None,
    workers: int | None = None,
    groups: str | None = None,
) -> dict[str, ImageSet]:
    """The image sets of a config, or of `data` instead.

    Args:
        config: the model's. Its section `evaluation` names the sets, each as a data loader, or their
            `folder`; `view` may be a transform instead, such as `dict(type="RandomFlip", prob=1.0)`, which
            makes a second view of `val`. Without a section, the sets of `knn_probe` are 'train' and
            'val'. Sets without a pipeline take the model's: the one of `val`, or of the test.
        data: another config with such a section, or a folder of `folder_loaders`.
        labels: file of lines `name class`, for the images of folders.
        class_level: level of the folders that are classes; see `classes_of`.
        workers: processes that load images, in place of the number that a loader names.
        groups: of the images of folders, which no division parts; see `groups_of`.

    Raises:
        ImageSetError: no images, or labels, levels and groups for images that are in no folder.
    """
    declared = declaring_config(config, data)
    if data and Path(data).is_dir():
        loaders = folder_loaders(Path(data), labels, class_level, groups)
    else:
        loaders = _declared_loaders(declared, labels, class_level, groups)
    loaders = loaders or _training_images(declared)
    if not loaders:
        raise ImageSetError(
            f"config {declared.filename} names no images to evaluate on: give it a section `{SECTION}`, "
            "or --data"
        )
    view_step = loaders["view"] if "type" in loaders.get("view", ()) else None
    if view_step:  # a transform that makes the second view
        loaders["view"] = copy.deepcopy(loaders["val"])
    if workers is not None:
        loaders = {name: dict(loader, num_workers=workers) for name, loader in loaders.items()}
    for name, loader in loaders.items():
        if _plain(loader).get("pipeline") is None:
            loaders[name] = _with_model_pipeline(name, loader, config, str(data or declared.filename))
    if view_step:
        _plain(loaders["view"])["pipeline"].insert(-1, view_step)
    with DefaultScope.overwrite_default_scope(scope_of(declared)):
        return {name: ImageSet(name, loader) for name, loader in loaders.items()}


def images_of_folder(config: Config, folder: Path, workers: int | None = None) -> ImageSet:
    """All images in a folder, without labels, by the pipeline of a model's config."""
    (loader,) = class_loaders({"images": (str(folder), "")}, class_level=0).values()
    if workers is not None:
        loader["num_workers"] = workers
    loader = _with_model_pipeline("images", loader, config, str(folder))
    with DefaultScope.overwrite_default_scope(scope_of(config)):
        return ImageSet("images", loader)


def declaring_config(config: Config, data: str | None) -> Config:
    """The config that declares image sets and protocols: another one if `data` names it."""
    return read_config(data) if data and not Path(data).is_dir() else config


def _with_model_pipeline(name: str, loader: Mapping[str, Any], config: Config, data: str) -> dict[str, Any]:
    """A loader whose dataset has no pipeline, with the model's pipeline and, unless it says them, options."""
    own = _model_loader(config, data)
    loader = {**own, **loader, "dataset": dict(loader["dataset"])}
    _plain(loader)["pipeline"] = _pipeline_of(own, dense=name.startswith("dense"))
    return loader


def _plain(loader: Mapping[str, Any]) -> dict[str, Any]:
    """A loader's dataset, without wrappers."""
    dataset = loader["dataset"]
    while "dataset" in dataset:
        dataset = dataset["dataset"]
    return dataset


def _declared_loaders(
    config: Config, labels: str | None, class_level: int | None, groups: str | None
) -> dict[str, Any]:
    """The image sets that a config names."""
    section = config.get(SECTION) or {}
    sets = {name: value for name, value in section.items() if name not in NO_SETS}
    folders = {name: (folder, "") for name, folder in sets.items() if isinstance(folder, str)}
    is_asked = any(source is not None for source in (labels, class_level, groups))
    if is_asked and not (folders or section.get("folder")):
        raise ImageSetError(
            "--labels, --class-level and --groups are for images of folders, but config "
            f"{config.filename} declares datasets: name a folder as --data"
        )
    sources = (labels, class_level, groups)
    loaders = folder_loaders(Path(section["folder"]), *sources) if section.get("folder") else {}
    loaders.update(class_loaders(folders, *sources) if folders else {})
    for name in sets:  # in the order of the section
        loaders[name] = loaders.pop(name) if name in folders else sets[name]
    if loaders:
        for loader in loaders.values():
            _find_files(loader, config)
        return loaders
    probe = config.get("knn_probe") or {}
    keys = {"train": "train_dataloader", "val": "val_dataloader"}
    return {name: probe[key] for name, key in keys.items() if key in probe}


def _find_files(loader: dict[str, Any], config: Config) -> None:
    """Take the files that a dataset names from beside its config, where a RUN has them.

    In the working folder there may be those of another RUN. If the config itself is there, names stay as they
    are: they are part of the features' identity, and a RUN may be moved.
    """
    folder = Path(config.filename or "").parent
    for key in NAMED_FILES:
        name = loader.get("dataset", {}).get(key)
        if name and (folder / str(name)).exists() and folder.absolute() != Path.cwd():
            loader["dataset"] = dict(loader["dataset"], **{key: str((folder / name).absolute())})


def _training_images(config: Config) -> dict[str, Any]:
    """The images that a config trains on, as `val` for measures without labels; none without a training."""
    loader = config.get("train_dataloader")
    if not loader:
        return {}
    loader = copy.deepcopy(dict(dataset=loader["dataset"]))
    _plain(loader).pop("pipeline", None)
    _find_files(loader, config)
    print_once(f"{config.filename} names no images to evaluate on: these are the training's (--data FOLDER)")
    return {"val": loader}


def _model_loader(config: Config, data: str) -> Mapping[str, Any]:
    """A loader with the model's own pipeline for a test."""
    loader = (config.get(SECTION) or {}).get("val")
    if loader is None and not config.get(SECTION):
        loader = (config.get("knn_probe") or {}).get("val_dataloader")
    if isinstance(loader, str):  # a folder, which has no pipeline
        loader = None
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
    sizes = [step.get("crop_size") or step.get("scale") for step in steps]
    sizes = [size for size in sizes if size]
    if not sizes:
        raise ImageSetError("the model's pipeline has no size, to which images with pixel labels are resized")
    size = tuple(to_2tuple(sizes[-1]))
    known = next((step for step in steps if "interpolation" in step), {})
    resize = {key: known[key] for key in ("backend", "interpolation") if key in known}
    return [
        dict(type="LoadImageFromFile"),
        dict(type="mmseg.Resize", scale=size, keep_ratio=False, **resize),
        dict(type="mmseg.LoadAnnotations"),
        dict(type="mmseg.PackSegInputs"),
    ]
