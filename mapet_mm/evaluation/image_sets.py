"""The images whose features are taken: any dataset of MMPretrain or MMSegmentation."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from mmengine.config import Config, ConfigDict
from mmengine.registry import DefaultScope
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from mapet_mm.config_files import scope_of, type_name, with_type_names
from mapet_mm.engine.launch import read_config
from mapet_mm.errors import UserError
from mapet_mm.evaluation.content import content
from mapet_mm.evaluation.file_contents import NO_FILE, digest_of_files, file_stats
from mapet_mm.registry import DATASETS

# What an image set's entry may say of its loader, beside the dataset.
LOADER_OPTIONS = {"batch_size": 64, "num_workers": 0}
SECTION = "evaluation"


class ImageSetError(UserError):
    """Images or labels that the evaluation cannot use."""


class ImageInfo(NamedTuple):
    """What a dataset says of an image.

    Args:
        path: its file; its number if it is in no file of its own.
        label: `gt_label`, an int where it is one class.
        annotation: file of its pixel labels.
        more: digest of everything else; empty if there is nothing else.
    """

    path: str
    label: Any
    annotation: str | None
    more: str


class ImageSet:
    """A dataset, its labels and its identity.

    Args:
        name: 'train', 'val', 'dense_train' or 'dense_val'.
        config: as a data loader's: `dataset`, with `batch_size` and `num_workers` if they are not to be 64
            and 0; other options are passed over.

    `pipelines` are its dataset's, and those of the datasets that it wraps, as the config has them.

    Raises:
        ImageSetError: the dataset cannot be built, or has no images.
    """

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.name = name
        options = {**LOADER_OPTIONS, **config}
        self.batch_size, self.num_workers = options["batch_size"], options["num_workers"]
        self.pipelines = list(_pipelines(config["dataset"])) or [None]
        try:
            self.dataset: Dataset = DATASETS.build(config["dataset"])
        except (OSError, KeyError, ValueError, TypeError, AssertionError, RuntimeError) as error:
            raise ImageSetError(f"`{name}` images: {error}".replace("\n", " ")) from error
        if not len(self.dataset):
            raise ImageSetError(f"`{name}` images: {type(self.dataset).__name__} has none")

    def __len__(self) -> int:
        return len(self.dataset)

    def path(self, index: int) -> str:
        """Path of an image; its number in a dataset that holds the images themselves."""
        return self._infos[index].path

    @property
    def paths(self) -> list[str]:
        """Paths of all images."""
        return [info.path for info in self._infos]

    @cached_property
    def stats(self) -> Int64[np.ndarray, "image 2"]:
        """Size and time of change of each image's file, asked for once (see `file_stats`)."""
        return file_stats(self.paths)

    @property
    def annotations(self) -> list[str]:
        """Files of pixel labels, of the images that have one."""
        return [info.annotation for info in self._infos if info.annotation]

    @cached_property
    def annotation_digest(self) -> str:
        """Of what these files hold."""
        return digest_of_files(self.annotations)

    @cached_property
    def labels(self) -> Int64[Tensor, " image"] | None:
        """Class of each image; None for images without labels, or with several each."""
        labels = [info.label for info in self._infos]
        if not all(isinstance(label, int) for label in labels):
            return None
        return torch.tensor(labels)

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes by index, where the dataset knows them."""
        classes = getattr(self.dataset, "metainfo", {}).get("classes")
        return None if classes is None else [str(name) for name in classes]

    @cached_property
    def digest(self) -> str:
        """Of the images' paths, file sizes and labels, all else that the dataset says, and the pipelines.

        What the files hold is not in it.
        """
        known = hashlib.sha256()
        for pipeline in self.pipelines:
            known.update(json.dumps(plain(pipeline), sort_keys=True).encode())
        for (path, label, annotation, more), (size, _) in zip(self._infos, self.stats.tolist(), strict=True):
            bytes_ = None if size == NO_FILE else size
            known.update(f"{path}|{bytes_}|{label}|{annotation}|{_size(annotation)}\n{more}".encode())
        # Names of classes count where there are pixel labels: the results name them.
        if any(info.annotation or info.more for info in self._infos):
            known.update(content(getattr(self.dataset, "metainfo", {})).encode())
        return known.hexdigest()

    @cached_property
    def _infos(self) -> list[ImageInfo]:
        indices = tqdm(range(len(self)), desc=f"reading names of {self.name}", unit="image", delay=2)
        return [self._info(index) for index in indices]

    def _info(self, index: int) -> ImageInfo:
        info = self.dataset.get_data_info(index)
        label = info.get("gt_label")
        if label is not None and torch.as_tensor(label).numel() == 1:
            label = int(label)
        said = {"img_path", "seg_map_path"}
        if label is None or isinstance(label, int):
            said.add("gt_label")
        if info.get("sample_idx") == index:  # in a wrapper it tells the datasets that it wraps apart
            said.add("sample_idx")
        path = str(info.get("img_path") or f"number {index}")
        more = {name: value for name, value in info.items() if name not in said}
        try:
            return ImageInfo(path, label, info.get("seg_map_path"), content(more) if more else "")
        except (TypeError, RecursionError) as error:
            raise ImageSetError(
                f"`{self.name}` images: what the dataset says of `{path}` cannot be compared ({error}): let "
                "it give plain values, arrays or tensors"
            ) from error


def check_labels(train: ImageSet, val: ImageSet) -> int:
    """The number of classes of two image sets that a classifier is trained and tested on.

    Raises:
        ImageSetError: images without labels, one class, a class of the images to classify or of the dataset
            that no image to learn from has, or classes in another order.
    """
    for images in (train, val):
        if images.labels is None:
            raise ImageSetError(
                f"the `{images.name}` images have no labels (one `gt_label` each): name a labelled dataset, "
                "or choose protocols that need none"
            )
    check_class_names(train, val)
    classes = set(train.labels.tolist())
    if len(classes) < 2:
        raise ImageSetError(
            f"the `train` images are all of one class ({classes.pop()}): nothing to tell apart"
        )
    known = range(len(train.class_names or ()))
    if missing := sorted((set(val.labels.tolist()) | set(known)) - classes):
        named = ", ".join(f"{c} ({train.class_names[c]})" if c in known else str(c) for c in missing[:5])
        raise ImageSetError(
            f"the `train` images have none of class {named}: add some, or leave the class out"
        )
    return max(classes) + 1


def check_class_names(train: ImageSet, val: ImageSet) -> None:
    """Raise ImageSetError if an index means another class in each of two sets that name their classes."""
    pairs = zip(train.class_names or (), val.class_names or (), strict=False)  # the last ones may be missing
    for index, (known, other) in enumerate(pairs):
        if known != other:
            raise ImageSetError(
                f"class {index} is `{known}` in the `{train.name}` images and `{other}` in the `{val.name}` "
                "images: add the class folder that is missing, or give both sets the same "
                "`metainfo=dict(classes=[...])`"
            )


def read_image_sets(config: Config, data: str | None = None) -> dict[str, ImageSet]:
    """The image sets of a config, or of what stands in for it.

    Args:
        config: the model's config. Its section `evaluation` names the sets, each as a data loader; where it
            names none, those of `knn_probe` are 'train' and 'val'.
        data: another config with such a section; or a folder of images with `train` and `val` in it, to
            which the pipeline of the model's config is applied.

    Raises:
        ImageSetError: no images, or `dense_train` and `dense_val` that name their classes differently.
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
        images = {name: ImageSet(name, loader) for name, loader in loaders.items()}
    if {"dense_train", "dense_val"} <= set(images):  # the protocols that compare them read one's names only
        check_class_names(images["dense_train"], images["dense_val"])
    return images


def _declared_loaders(config: Config) -> dict[str, Any]:
    """The image sets that a config names; none where its sections have options of protocols alone."""
    section = {name: loader for name, loader in (config.get(SECTION) or {}).items() if name != "protocols"}
    probe = config.get("knn_probe") or {}
    return section or {
        name: probe[f"{name}_dataloader"] for name in ("train", "val") if f"{name}_dataloader" in probe
    }


def _folder_loaders(config: Config, folder: Path) -> dict[str, Any]:
    loaders = _declared_loaders(config)
    if not loaders and scope_of(config) == "mmpretrain":  # others have pixel labels or boxes, these have not
        loaders = {"val": config.get("test_dataloader")}
    if not loaders.get("val"):
        raise ImageSetError(
            f"config {config.filename} has no pipeline for the images in {folder}: give it a section "
            f"`{SECTION}`, or name a config with one as --data"
        )
    made = {}
    for name in ("train", "val"):
        if not (folder / name).is_dir():
            raise ImageSetError(f"{folder} has no folder `{name}`: it takes `train` and `val`")
        pipeline = _without_tokens(loaders["val"].dataset.pipeline)
        known = dict(type="CustomDataset", data_root=str(folder), data_prefix=name, pipeline=pipeline)
        if (listing := folder / "meta" / f"{name}.txt").is_file():
            lines = [line.strip() for line in listing.read_text().split("\n")]
            if not any(lines):
                raise ImageSetError(f"{listing} is empty: it takes a line `PATH CLASS`, or `PATH`, an image")
            known["ann_file"] = f"meta/{name}.txt"
            known["with_label"] = all(line.rpartition(" ")[2].isdigit() for line in lines if line)
        else:  # a folder a class, or no labels
            known["with_label"] = any(path.is_dir() for path in (folder / name).iterdir())
        made[name] = ConfigDict(loaders["val"], dataset=known)
    return made


def differs_in_pipeline(config: Config, images: Mapping[str, ImageSet]) -> str | None:
    """The first of some image sets whose images a config's own pipeline would make otherwise, if any.

    Args:
        config: another model's config, with image sets of its own or a test pipeline, or without.
        images: the image sets that are used for all models.
    """
    test = {"val": config.test_dataloader} if config.get("test_dataloader") else {}
    own = _declared_loaders(config) or test
    for name, used in images.items():
        if name in own and _pixels(_pipelines(own[name]["dataset"])) != _pixels(used.pipelines):
            return name
    return None


def _pixels(pipelines: Iterable[Any]) -> list[Any]:
    """What some pipelines do to images, for comparisons; packing them changes none."""
    return [plain(with_type_names(_without_tokens(steps)[:-1])) for steps in pipelines]


def _without_tokens(pipeline: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A pipeline without stored tokens, which are a pre-training's, and of its own images."""
    steps = [dict(step) for step in pipeline or () if "Token" not in type_name(step["type"])]
    if steps:
        steps[-1].pop("algorithm_keys", None)
    return steps


def plain(value: Any) -> Any:
    """A config's value as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return (
        value if isinstance(value, str | int | float | None) else getattr(value, "__qualname__", str(value))
    )


def _pipelines(config: Any) -> Iterator[Any]:
    """Every `pipeline` in a dataset's config: its own, and those of the datasets that it wraps."""
    if isinstance(config, Mapping):
        for name in sorted(config, key=str):
            if name == "pipeline":
                yield config[name]
            else:
                yield from _pipelines(config[name])
    elif isinstance(config, list | tuple):
        for one in config:
            yield from _pipelines(one)


def _size(path: str | None) -> int | None:
    """Bytes of a local file, which tell another image of the same name; None for what is elsewhere."""
    try:
        return os.stat(path).st_size
    except (OSError, TypeError):
        return None
