"""The images whose features are taken: any dataset of MMPretrain or MMSegmentation."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from mapet_mm.evaluation.content import content
from mapet_mm.evaluation.file_contents import NO_FILE, digest_of_files, file_stats
from mapet_mm.registry import DATASETS
from mapet_mm.structures.image_names import label_of
from mapet_mm.utils.config import plain
from mapet_mm.utils.errors import UserError

# What an image set's entry may say of its loader, beside the dataset.
LOADER_OPTIONS = {"batch_size": 64, "num_workers": 0}


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
        self.pipelines = list(pipelines_of(config["dataset"])) or [None]
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
        label = label_of(info)
        if label is None:  # several, as of multi-label images, or none
            label = info.get("gt_label")
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
        ImageSetError: images without labels or with one below 0, one class, a class of the images to
            classify or of the dataset that no image to learn from has, or classes in another order.
    """
    for images in (train, val):
        if images.labels is None:
            raise ImageSetError(
                f"the `{images.name}` images have no labels (one `gt_label` each): name a labelled dataset, "
                "or choose protocols that need none"
            )
        if unlabelled := int((images.labels < 0).sum()):
            raise ImageSetError(
                f"{unlabelled} of the `{images.name}` images have the label {int(images.labels.min())}: "
                "leave images without a class out of the dataset"
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


def pipelines_of(config: Any) -> Iterator[Any]:
    """Every `pipeline` in a dataset's config: its own, and those of the datasets that it wraps."""
    if isinstance(config, Mapping):
        for name in sorted(config, key=str):
            if name == "pipeline":
                yield config[name]
            else:
                yield from pipelines_of(config[name])
    elif isinstance(config, list | tuple):
        for one in config:
            yield from pipelines_of(one)


def _size(path: str | None) -> int | None:
    """Bytes of a local file, which tell another image of the same name; None for what is elsewhere."""
    try:
        return os.stat(path).st_size
    except (OSError, TypeError):
        return None
