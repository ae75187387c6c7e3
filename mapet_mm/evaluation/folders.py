"""Folders of images, known by their layout."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from mapet_mm.datasets.classes import level_of_classes
from mapet_mm.datasets.copies import first_copies
from mapet_mm.datasets.groups import draw_share
from mapet_mm.datasets.image_folder import ImageFolder, image_names, is_of_system, others_text
from mapet_mm.datasets.labels import labels_of
from mapet_mm.datasets.look import look
from mapet_mm.datasets.pictures import Reading
from mapet_mm.datasets.pipelines import image_paths
from mapet_mm.datasets.tiles import tile_names
from mapet_mm.evaluation.images import Data, ImageSetError
from mapet_mm.utils.dist import print_once

FIFTH = 5
IMAGES = "mapet_mm.ImageFolder"
MOST_COMPARED = 100_000  # images, among which copies are looked for: of more, it would take minutes each time
# MMSegmentation's datasets: folders of images and of labels, and the two parts of each.
DENSE = {
    "ADE20KDataset": ("images", "annotations", {"train": "training", "val": "validation"}),
    "PascalVOCDataset": ("JPEGImages", "SegmentationClass", {"train": "train", "val": "val"}),
    "CityscapesDataset": ("leftImg8bit", "gtFine", {"train": "train", "val": "val"}),
}
ADE20K_CLASSES = "objectInfo150.txt"  # a file of ADE20K beside `images` and `annotations`


def folder_loaders(folder: Path, data: Data) -> dict[str, Any]:
    """Image sets of a folder, by its layout, without pipelines.

    Known are ImageNet's and any other `train` and `val` with a folder per class, or `val` flat with its
    classes in `meta/val.txt`; `train` and `val` without classes; folders per class alone, where every fifth
    image of each class is tested on; and ADE20K's, Pascal VOC's and Cityscapes' with pixel labels.

    Args:
        folder: the folder.
        data: what is said of its images.

    Raises:
        ImageSetError: another layout, or ADE20K's without its list of classes; or groups where they have no
            meaning.
    """
    if (folder / "VOC2012").is_dir():
        folder /= "VOC2012"
    for kind, (images, labels, _) in DENSE.items():
        if (folder / images).is_dir() and (folder / labels).is_dir():
            return _with_pixel_labels(kind, folder, data)
    if not (folder / "train").is_dir():
        return _one_folder(folder, data)
    if not (folder / "val").is_dir():
        raise ImageSetError(f"{folder} has no folder `val`: it takes `train` and `val`")
    flat = {}
    for name in ("train", "val"):
        is_listed = (folder / f"meta/{name}.txt").is_file() and not data.labels
        if is_listed and not _class_folders(folder / name):
            if data.groups or data.tiles:
                raise ImageSetError(
                    f"{folder} has its classes in meta/{name}.txt: --groups and --tiles are for folders of "
                    "classes"
                )
            listed = dict(type=IMAGES, data_root=str(folder), data_prefix=name)
            flat[name] = dict(dataset=dict(listed, ann_file=f"meta/{name}.txt"))
    parts = {name: (str(folder), name) for name in ("train", "val") if name not in flat}
    made = class_loaders(parts, data)
    if flat and "train" in made:  # their numbers are those of the class folders, also of empty ones
        made["train"]["dataset"].update(metainfo=dict(classes=_class_folders(folder / "train")))
    return {name: {**made, **flat}[name] for name in ("train", "val")}


def pictures_in_numbers(options: Mapping[str, Any], path: str | None) -> dict[str, Any]:
    """Options of `LoadPicture`, of whose range two percentiles become the values of a folder's images.

    Args:
        options: `range` may be two percentiles, `("1%", "99%")`.
        path: the folder.

    Raises:
        UserError: percentiles, and no folder to look into.
    """
    if not any(isinstance(value, str) for value in options.get("range") or ()):
        return dict(options)
    if not path or not Path(path).is_dir():
        raise ImageSetError("--range: percentiles are of the images of a folder: name it, or give numbers")
    names, _ = image_names(path)
    found = look([os.path.join(path, name) for name in names], Reading(**options))
    for line in found.words:
        print_once(line)
    return {name: value for name, value in found.load.items() if name != "type"}


def _class_folders(folder: Path) -> list[str]:
    """Names of the folders in a folder that may be classes."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not is_of_system(path.name))


def class_loaders(parts: Mapping[str, tuple[str, str]], data: Data) -> dict[str, Any]:
    """Image sets of folders with a folder per class, at one level of all; without classes if there are none.

    `train` and `val` number the classes of both; further sets may have others, which are known by name.

    Args:
        parts: for each set, a folder that names are relative to, and a folder in it, or "" for all of it.
        data: what is said of their images.
    """
    names = {}
    for name, (folder, part) in parts.items():
        names[name], others = image_names(folder, part)
        if others:
            print_once(f"{Path(folder, part)}: other files, left out: {others_text(others)}")
        if data.tiles:
            names[name], _ = tile_names(folder, names[name], *data.tiles)
    found = list(chain.from_iterable(names.values()))
    labels = labels_of(found, data.labels, data.class_level, data.groups)
    classes = labels.classes
    print_once(f"{', '.join(sorted({folder for folder, _ in parts.values()}))}: {labels.about}")
    _note_copies(parts, names)
    of_both = chain(names.get("train", ()), names.get("val", ()))
    both = {classes[name] for name in of_both if name in classes}
    loaders = {}
    for name, (folder, part) in parts.items():
        dataset = dict(type=IMAGES, data_prefix=folder, part=part, with_label=False)
        if data.groups:
            dataset["groups"] = str(data.groups)
        if data.tiles:
            dataset["tiles"] = data.tiles
        if classes.keys() & names[name]:
            dataset["with_label"] = True
            if data.labels:
                dataset["labels"] = str(data.labels)
            else:
                dataset["class_level"] = data.class_level or level_of_classes(found)
            if name in ("train", "val"):
                dataset.update(metainfo=dict(classes=sorted(both)))
        loaders[name] = dict(dataset=dataset)
    return loaders


def _note_copies(parts: Mapping[str, tuple[str, str]], names: Mapping[str, list[str]]) -> None:
    """Say how many images of `val` are copies of images of `train`."""
    num_images = sum(map(len, names.values()))
    if not {"train", "val"} <= set(parts) or num_images > MOST_COMPARED:
        return
    train = [os.path.join(parts["train"][0], name) for name in names["train"]]
    val = [os.path.join(parts["val"][0], name) for name in names["val"]]
    first = first_copies(train + val)
    num_copies = sum(index < len(train) for index in first[len(train) :])
    if num_copies:
        print_once(f"{num_copies} of {len(val)} `val` images are copies of `train` images")


def _with_pixel_labels(kind: str, folder: Path, data: Data) -> dict[str, Any]:
    """Loaders of images with pixel labels; Pascal VOC's parts are lists, the others' are folders."""
    if kind == "ADE20KDataset" and not (folder / ADE20K_CLASSES).is_file():
        # Another data set in ADE20K's folders has its own classes, perhaps a 0.
        raise ImageSetError(
            f"{folder} has the folders of ADE20K, but not its {ADE20K_CLASSES}: for other classes name a "
            "config with `dense_train` and `dense_val` as --data; for ADE20K add that file"
        )
    if data.groups or data.tiles:
        raise ImageSetError(f"{folder} has pixel labels: --groups and --tiles are for classes of images")
    images, labels, parts = DENSE[kind]
    loaders = {}
    for name, part in parts.items():
        dataset = dict(type=f"mmseg.{kind}", data_root=str(folder))
        if kind == "PascalVOCDataset":
            dataset["data_prefix"] = dict(img_path=images, seg_map_path=labels)
            dataset["ann_file"] = f"ImageSets/Segmentation/{part}.txt"
        else:
            dataset["data_prefix"] = dict(img_path=f"{images}/{part}", seg_map_path=f"{labels}/{part}")
        loaders[f"dense_{name}"] = dict(dataset=dataset)
    return loaders


def _one_folder(folder: Path, data: Data) -> dict[str, Any]:
    """Two loaders of one folder per class; every fifth image of each class is in `val`, with its copies.

    Of images in groups, groups with a fifth of the images are; of copies the first alone is taken then.

    A folder without classes is `val` alone, for measures without labels, with mirrored images as second view.
    """
    (loader,) = class_loaders({"all": (str(folder), "")}, data).values()
    known = loader["dataset"]
    if not known["with_label"]:
        print_once(f"{folder}: measures without labels")
        return {"val": loader, "view": dict(type="RandomFlip", prob=1.0)}
    dataset = ImageFolder(**{name: value for name, value in known.items() if name != "type"})
    has_groups = data.groups or data.tiles  # tiles of a file are one
    indices = _divided_by_groups(dataset) if has_groups else _divided_by_images(dataset)
    rule = "groups with a fifth of the images are" if has_groups else "every fifth image of each class is"
    print_once(f"{folder}: {rule} tested on, {len(indices['val'])} of {len(dataset)}")
    return {name: dict(dataset=dict(indices=own, **known)) for name, own in indices.items()}


def _divided_by_groups(dataset: ImageFolder) -> dict[str, list[int]]:
    """The images of two sides: whole groups, in proportion to the classes, and of copies the first."""
    first = first_copies(list(image_paths(dataset)))
    images = [index for index in range(len(dataset)) if first[index] == index]
    classes = dict(enumerate(dataset.get_gt_labels().tolist()))
    groups = {index: dataset.get_data_info(index)["group"] for index in images}
    tested = draw_share(images, 1 / FIFTH, 0, classes, groups)
    if not tested:
        raise ImageSetError("--groups: each group is too large to be tested on: name smaller ones")
    return {"train": sorted(set(images).difference(tested)), "val": sorted(tested)}


def _divided_by_images(dataset: ImageFolder) -> dict[str, list[int]]:
    """The images of two sides: every fifth of each class, with its copies."""
    indices: dict[str, list[int]] = {"train": [], "val": []}
    side_of: dict[int, str] = {}
    counts: Counter[int] = Counter()
    first = first_copies(list(image_paths(dataset)))
    for index, label in enumerate(dataset.get_gt_labels().tolist()):
        if first[index] == index:
            counts[label] += 1
            side_of[index] = "val" if counts[label] % FIFTH == 0 else "train"
        indices[side_of[first[index]]].append(index)
    if not indices["val"]:
        raise ImageSetError(
            f"{dataset.img_prefix}: no class has {FIFTH} images that are not copies, so none is left to "
            "test on: take a folder with more, or with `train` and `val` in it, or --class-level none"
        )
    return indices
