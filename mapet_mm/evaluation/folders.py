"""Folders of images, known by their layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mapet_mm.datasets.formats import EXTENSIONS
from mapet_mm.utils.dist import print_once
from mapet_mm.utils.errors import UserError

FIFTH = 5
FORMATS = dict(type="CustomDataset", extensions=EXTENSIONS)
# MMSegmentation's datasets: folders of images and of labels, and the two parts of each.
DENSE = {
    "ADE20KDataset": ("images", "annotations", {"train": "training", "val": "validation"}),
    "PascalVOCDataset": ("JPEGImages", "SegmentationClass", {"train": "train", "val": "val"}),
    "CityscapesDataset": ("leftImg8bit", "gtFine", {"train": "train", "val": "val"}),
}
ADE20K_CLASSES = "objectInfo150.txt"  # a file of ADE20K beside `images` and `annotations`


class ImageSetError(UserError):
    """Images or labels that the evaluation cannot use."""


def folder_loaders(folder: Path) -> dict[str, Any]:
    """Image sets of a folder, by its layout, without pipelines.

    Known are ImageNet's and any other `train` and `val` with a folder per class, or `val` flat with its
    classes in `meta/val.txt`; `train` and `val` without classes; folders per class alone, where every fifth
    image of each class is tested on; and ADE20K's, Pascal VOC's and Cityscapes' with pixel labels.

    Raises:
        ImageSetError: another layout, or ADE20K's without its list of classes.
    """
    if (folder / "VOC2012").is_dir():
        folder /= "VOC2012"
    for kind, (images, labels, parts) in DENSE.items():
        if (folder / images).is_dir() and (folder / labels).is_dir():
            if kind == "ADE20KDataset":
                _check_ade20k(folder)
            return {
                f"dense_{name}": _dense(kind, folder, images, labels, part) for name, part in parts.items()
            }
    if not (folder / "train").is_dir():
        return _one_folder(folder)
    made = {}
    for name in ("train", "val"):
        if not (folder / name).is_dir():
            raise ImageSetError(f"{folder} has no folder `{name}`: it takes `train` and `val`")
        with_label = any(path.is_dir() for path in (folder / name).iterdir())  # a folder per class
        known = dict(data_prefix=name, with_label=with_label)
        if not with_label and (folder / f"meta/{name}.txt").is_file():
            known.update(ann_file=f"meta/{name}.txt", with_label=True)
        made[name] = dict(dataset=dict(**FORMATS, data_root=str(folder), **known))
    return made


def _check_ade20k(folder: Path) -> None:
    """Raise ImageSetError for another data set in ADE20K's folders: it has its own classes, perhaps a 0."""
    if not (folder / ADE20K_CLASSES).is_file():
        raise ImageSetError(
            f"{folder} has the folders of ADE20K, but not its {ADE20K_CLASSES}: for other classes name a "
            "config with `dense_train` and `dense_val` as --data; for ADE20K add that file"
        )


def _dense(kind: str, folder: Path, images: str, labels: str, part: str) -> dict[str, Any]:
    """A loader of images with pixel labels; Pascal VOC's parts are lists, the others' are folders."""
    known = dict(type=f"mmseg.{kind}", data_root=str(folder))
    if kind == "PascalVOCDataset":
        prefix = dict(img_path=images, seg_map_path=labels)
        known.update(data_prefix=prefix, ann_file=f"ImageSets/Segmentation/{part}.txt")
    else:
        known["data_prefix"] = dict(img_path=f"{images}/{part}", seg_map_path=f"{labels}/{part}")
    return dict(dataset=known)


def _one_folder(folder: Path) -> dict[str, Any]:
    """Two loaders of one folder per class; every fifth image of each class is in `val`.

    A folder without classes is `val` alone, for measures without labels, with mirrored images as second view.
    """
    from mmpretrain.datasets import CustomDataset

    known = dict(**FORMATS, data_prefix=str(folder))
    if not any(path.is_dir() for path in folder.iterdir()):
        print_once(f"{folder} has no folder per class: measures without labels")
        mirrored = dict(type="RandomFlip", prob=1.0)
        return {"val": dict(dataset=dict(**known, with_label=False)), "view": mirrored}
    known["with_label"] = True
    labels = CustomDataset(**{name: value for name, value in known.items() if name != "type"}).get_gt_labels()
    indices: dict[str, list[int]] = {"train": [], "val": []}
    for label in np.unique(labels):
        for count, index in enumerate(np.flatnonzero(labels == label).tolist(), start=1):
            indices["val" if count % FIFTH == 0 else "train"].append(index)
    num_tested = len(indices["val"])
    print_once(f"{folder}: every fifth image of each class is tested on, {num_tested} of {len(labels)}")
    return {name: dict(dataset=dict(indices=own, **known)) for name, own in indices.items()}
