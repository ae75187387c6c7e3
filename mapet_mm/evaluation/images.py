"""A set of images to evaluate on: its files, labels and identity."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from mmcv.transforms import LoadImageFromFile
from mmengine.dataset import BaseDataset, Compose
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from mapet_mm.datasets.building import build_dataset, require_photographs
from mapet_mm.datasets.pipelines import label_of, leaf_datasets
from mapet_mm.datasets.reading import ImageReader
from mapet_mm.structures.image_files import file_of, tar_of
from mapet_mm.utils.dist import print_once
from mapet_mm.utils.errors import UserError, listed
from mapet_mm.utils.identity import digest
from mapet_mm.utils.loader_workers import default_workers


class ImageSetError(UserError):
    """Images or labels that the evaluation cannot use."""


@dataclass(frozen=True)
class Data:
    """Which images somebody wants to know about, and what is said of them beside their files.

    Args:
        path: a folder of images, or a config that names image sets; None for those that the model's config
            names.
        labels: file of lines `name class`, for the images of folders.
        class_level: level of the folders that are classes; see `classes_of`.
        groups: of the images of folders, which no division parts; see `groups_of`.
        workers: processes that load images, in place of the number that a config names.
        tiles: side and overlap, in pixels, of the tiles of the images of folders, each an image then.
    """

    path: str | None = None
    labels: str | None = None
    class_level: int | None = None
    groups: str | None = None
    workers: int | None = None
    tiles: tuple[int, int] | None = None


class ImageSet:
    """The images of a dataset of MMPretrain or MMSegmentation, with their labels and their identity.

    Two sets with the same config of the dataset and the same files are equal.

    Attributes:
        files: path of each image, of those that are left out, too; "number 5" where a dataset holds images.
        labels: class of each image; None for images without labels, or with several each.
        groups: number of each image's group, which no draw parts, such as a patient's; None without groups.
        digest: of the dataset's config and each image's path, label, file size and time.

    Args:
        name: such as "train" and "val".
        config: as a data loader's: `dataset`, and `batch_size` (64) and `num_workers` (up to 8); `answers` is
            a JSON file with the right classes of each image of ImageNet's `val`, as ReaL's; `per_class` says
            whether figures are means over classes, by default of classes of unequal size alone, see
            `Evaluated`; other options are ignored.
        like: another set; if it has the same images by another pipeline, names are not read again.
    """

    def __init__(self, name: str, config: Mapping[str, Any], like: ImageSet | None = None) -> None:
        self.name = name
        self.config = config["dataset"]
        self.batch_size = config.get("batch_size", 64)
        self.num_workers = config.get("num_workers", default_workers())
        self.answers = config.get("answers")
        self.per_class: bool | None = config.get("per_class")
        if like is not None and self._differs_by_pipeline(like):
            self.dataset = copy.copy(like.dataset)
            self.dataset.pipeline = Compose(self.config["pipeline"])
            require_photographs(self.dataset)
            self.files = like.files
            self._labels = like._labels
            self._groups = like._groups
        else:
            self.dataset: Dataset = build_dataset(self.config)
            self._read_names()
        # Another model that takes the images alike asks the disk for no file's time again.
        self._same = like if like is not None and like.config == self.config else None
        for leaf in leaf_datasets(self.dataset):
            steps = getattr(getattr(leaf, "pipeline", None), "transforms", ())
            if steps and isinstance(steps[0], LoadImageFromFile):
                steps[0] = ImageReader(steps[0])
        self.left_out: dict[int, str] = {}  # images that cannot be decoded, with the reason
        self.shown = np.arange(len(self.files))  # the others

    def _differs_by_pipeline(self, other: ImageSet) -> bool:
        """True if another set's dataset is one without wrappers that has the same images."""
        listed = [{**config, "pipeline": None} for config in (self.config, other.config)]
        return isinstance(other.dataset, BaseDataset) and listed[0] == listed[1]

    def _read_names(self) -> None:
        """Read path, label and group of each image."""
        self.files: list[str] = []
        self._labels: list[int | None] = []
        self._groups: list[str | None] = []
        for number in tqdm(range(len(self.dataset)), f"reading names of {self.name}", unit="image", delay=2):
            info = self.dataset.get_data_info(number)
            self.files.append(str(info.get("img_path") or f"number {number}"))
            self._labels.append(label_of(info))
            self._groups.append(info.get("group"))

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
    def group_names(self) -> set[str]:
        """The groups of its images."""
        return {group for group in self._groups if group is not None}

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
        if self._same is not None:
            return self._same.digest
        known = hashlib.sha256(digest(self.config).encode())
        for path, label in zip(self.files, self._labels, strict=True):
            line = f"{path}|{label}|{_size_and_time(path)}\n"
            known.update(line.encode("utf-8", "surrogateescape"))  # names may be no UTF-8
        return known.hexdigest()

    def useful_workers(self, num_images: int) -> int:
        """How many processes load some of the images: none for one batch, and at most one for each."""
        num_batches = -(-num_images // self.batch_size)
        return min(self.num_workers, num_batches) if num_batches > 1 else 0


def _size_and_time(path: str) -> tuple[int, int] | None:
    """Size and mtime of an image's file, or of the tar file that it is in; None for images elsewhere."""
    try:
        found = os.stat(file_of(path))
    except OSError:
        tar_file = tar_of(path)
        if tar_file is None:
            return None
        found = tar_file.stat()
    return found.st_size, found.st_mtime_ns
