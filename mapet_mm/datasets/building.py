"""Datasets of configs, and one line for what they lack, where the libraries have an assertion."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmpretrain.datasets import CustomDataset
from torch.utils.data import Dataset

from mapet_mm.datasets.image_folder import ImageFolder, image_names, is_of_system, others_text
from mapet_mm.datasets.pictures import look_at_path, reads_photographs, require_kept, spread
from mapet_mm.datasets.pipelines import image_paths, leaf_datasets
from mapet_mm.registry import DATASETS
from mapet_mm.utils.config import type_name
from mapet_mm.utils.dist import is_first_process, print_once
from mapet_mm.utils.errors import UserError, listed

REMEDY = "type='mapet_mm.ImageFolder' follows the rules of mapet-mm pretrain"


class DatasetError(UserError, ValueError):
    """A dataset has not the files that its config names."""


def build_dataset(config: Mapping[str, Any]) -> Dataset:
    """Build the dataset of a config, `dict(type=..., ...)`; says where it lists a folder by other rules.

    Raises:
        DatasetError: there are no images, no list of them, or other class folders than the dataset's.
        PictureError: images have more bits, bands or pages than its pipeline keeps.
    """
    with building(config):
        dataset = DATASETS.build(config)
    note_other_rules(dataset)
    require_photographs(dataset)
    return dataset


def require_photographs(dataset: Dataset) -> None:
    """Raise PictureError if the images of a dataset are more than its reader of photographs keeps."""
    for leaf in leaf_datasets(dataset):
        steps = getattr(getattr(leaf, "pipeline", None), "transforms", ())
        if steps and reads_photographs(steps[0]):
            pictures = {}
            for index in spread(range(len(leaf))):
                path = str(leaf.get_data_info(index).get("img_path"))
                pictures[path] = look_at_path(path)
            require_kept(pictures)


def note_other_rules(dataset: Dataset) -> None:
    """Say where MMPretrain's datasets of folders follow other rules than `ImageFolder`."""
    if not is_first_process():
        return
    for leaf in leaf_datasets(dataset):
        if not isinstance(leaf, CustomDataset) or isinstance(leaf, ImageFolder) or leaf.ann_file:
            continue
        root = leaf.img_prefix
        kind = type(leaf).__name__
        passed_over: Counter[str] = Counter()
        if type(leaf) is CustomDataset and os.path.isdir(root):  # not ImageNet, which is large and has JPEGs
            names, _ = image_names(root)
            passed_over.update(Path(name).suffix for name in names if not leaf.is_valid_file(name))
        if passed_over:
            kinds = others_text(passed_over)
            print_once(f"{root}: {kinds} left out, which {kind} does not take: {REMEDY}")
        folders = set(getattr(leaf, "folder_to_idx", ()))
        for folder in {os.path.dirname(path) for path in image_paths(leaf)}:
            folders.update(os.path.relpath(folder, root).split("/"))
        of_system = sorted(name for name in folders if is_of_system(name) and name != os.curdir)
        if of_system:
            where = listed(of_system, most=5)
            print_once(f"{root}: {kind} takes images or classes of {where}: remove them, or {REMEDY}")


@contextmanager
def building(config: Mapping[str, Any] | Dataset) -> Iterator[None]:
    """Within this context, a dataset of this config is built: a DatasetError stands for its library's."""
    try:
        yield
    except (AssertionError, RuntimeError, ValueError) as error:
        if not isinstance(config, Mapping):  # it was built before
            raise
        while isinstance(config.get("dataset"), Mapping):  # inside a wrapper, as RepeatDataset
            config = config["dataset"]
        missing = _what_is_missing(config, str(error))
        if missing is None:
            raise
        raise DatasetError(f"{type_name(config['type'])}: {missing}") from error


def _what_is_missing(config: Mapping[str, Any], text: str) -> str | None:
    """What a dataset lacks, and what to do, by the text of its library's error; None for other errors."""
    prefix = config.get("data_prefix") or {}
    if "need at least one array" in text and isinstance(prefix, Mapping):
        folder = Path(config.get("data_root") or "", prefix.get("img_path") or "")
        suffix = config.get("img_suffix") or "by default the dataset's own, often .jpg"
        return f"`{folder}` has no image whose name ends with `img_suffix` ({suffix}): set it to theirs"
    if "Failed to load `ann_file`" in text:
        path = text.rpartition(" ")[2]
        return (
            f"its list of images `{path}` is missing: add it, a name a line without ending, or take "
            "`type='BaseSegDataset'` without `ann_file`, which takes all images of a folder"
        )
    if "number of subfolders" in text:
        folder = Path(config.get("data_root") or "", config.get("data_prefix") or config.get("split") or "")
        folders = sorted(path.name for path in folder.glob("*") if path.is_dir())
        of_system = [name for name in folders if is_of_system(name)]
        if of_system:
            left = listed(of_system, most=5)
            return f"{text.partition('. ')[0]}, with {left}, which a system left in `{folder}`: remove it"
        return (
            f"{text.partition('. ')[0]}: for a part of the classes give their folders' names as "
            "`classes`, a list or a file with a name a line (ls FOLDER > FILE), to the training and the "
            "validation set, and their number as `num_classes`"
        )
    return text if text.startswith(("Found 0 files", "Cannot find")) else None
