"""Folders of images: which files in them are images, and a dataset of these."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from mmengine.fileio import join_path, list_from_file
from mmpretrain.datasets import CustomDataset

from mapet_mm.datasets.classes import classes_at, level_of_classes, read_labels
from mapet_mm.datasets.groups import groups_of, read_groups
from mapet_mm.datasets.tiles import tile_names
from mapet_mm.registry import DATASETS
from mapet_mm.utils.errors import UserError, listed, printable

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".dcm")
# What network storages, systems and tools leave beside images, apart from hidden files and folders.
OF_SYSTEMS = {
    *("@eadir", "@tmp", "@recycle", "#recycle", "#snapshot", "lost+found", "lost.dir"),
    *("$recycle.bin", "recycler", "system volume information", "thumbs"),
    *("__macosx", "network trash folder", "temporary items", "__pycache__"),
}
# Images whose names no list can hold; those without UTF-8 are left out by `find_images` alone.
UNLISTED = "with a line break or no UTF-8 in their names"


def is_of_system(name: str) -> bool:
    """True for the name of a file or folder that is hidden or that a system leaves behind."""
    return name.startswith(".") or name.casefold() in OF_SYSTEMS


def image_names(folder: str | os.PathLike, part: str = "") -> tuple[list[str], Counter[str]]:
    """Names of the images below a folder, relative to it and sorted; and how many others there are of a kind.

    Hidden files and folders, and folders that systems leave behind, are passed over; links are followed. A
    name with a line break would be two in a list: it counts among the others.

    Args:
        folder: that the names are relative to.
        part: folder in it whose images are listed alone.

    Raises:
        OSError: a folder that cannot be read.
    """
    root = os.path.abspath(folder)
    names: list[str] = []
    others: Counter[str] = Counter()
    for path, folders, files in os.walk(Path(root, part), followlinks=True, onerror=_raise):
        kept = []
        for name in folders:
            if is_of_system(name):
                if not name.startswith("."):
                    others[f"`{name}`"] += 1
            elif _leads_back(os.path.join(path, name), root):
                others[f"link `{printable(name)}` to a folder that it is in"] += 1
            else:
                kept.append(name)
                if name.lower().endswith(EXTENSIONS) and not os.listdir(os.path.join(path, name)):
                    others[f"empty folder `{printable(name)}`"] += 1
        folders[:] = kept  # os.walk goes into these
        inside = os.path.relpath(path, root)
        for name in files:
            if is_of_system(name):
                continue
            if name.lower().endswith(EXTENSIONS):
                found = name if inside == os.curdir else f"{inside}/{name}"
                if "\n" in found or "\r" in found:
                    others[UNLISTED] += 1
                else:
                    names.append(found)
            else:
                others[printable(Path(name).suffix) or "no suffix"] += 1
    return sorted(names), others


def _leads_back(folder: str, root: str) -> bool:
    """True for a link to one of the folders through which it was reached: it would be followed for ever."""
    if not os.path.islink(folder):
        return False
    target = os.stat(folder)
    while len(folder) > len(root):
        folder = os.path.dirname(folder)
        if os.path.samestat(target, os.stat(folder)):
            return True
    return False


def _raise(error: OSError) -> None:
    raise error


def others_text(others: Counter[str]) -> str:
    """'1 .heic, 2 .txt'."""
    return ", ".join(f"{number} {kind}" for kind, number in sorted(others.items()))


@DATASETS.register_module()
class ImageFolder(CustomDataset):
    """The images of a folder, or of a list: MMPretrain's `CustomDataset` with this package's rules.

    All formats of `mapet-mm pretrain` are taken, files and folders of systems are not (`image_names`), and
    names in a list may begin with a space. With labels, images are in the order of their classes, and those
    without a class are left out.

    Args:
        part: folder in `data_prefix` whose images are taken alone.
        class_level: level of the folders that are classes, 1 for those directly in `data_prefix`; by default
            see `level_of_classes`.
        labels: file of lines `name class`, instead of folders.
        groups: level of folders, or file of lines `name group`; see `groups_of`. An image's info then has its
            `group`.
        tiles: side and overlap of the tiles of each picture, each of which is an image then, for
            `LoadPicture(tile=SIDE)`; without `groups` those of a file are one group.
        **options: of `CustomDataset`.

    Raises:
        UserError: no images, or none with a class.

    Examples:
        >>> import tempfile
        >>> from PIL import Image
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("cat", "dog", "@eaDir"):
        ...     (folder / name).mkdir()
        ...     Image.new("RGB", (8, 8)).save(folder / name / "1.webp")
        >>> DATASETS.build(dict(type="mapet_mm.ImageFolder", data_prefix=str(folder))).metainfo["classes"]
        ('cat', 'dog')
    """

    def __init__(
        self,
        part: str = "",
        class_level: int | None = None,
        labels: str | None = None,
        groups: str | int | None = None,
        tiles: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        self.part = part
        self.class_level = class_level
        self.labels = labels
        self.groups = groups
        self.tiles = tiles
        super().__init__(**{"extensions": EXTENSIONS, **options})

    def load_data_list(self) -> list[dict[str, Any]]:
        """Path, with labels class and with groups group of each image."""
        samples = self._listed_samples() if self.ann_file else self._find_samples()
        groups = None
        if self.groups is not None:
            groups = read_groups(self.groups, [name for name, _ in samples])
        elif self.tiles:
            groups, _ = groups_of(None, [name for name, _ in samples])
        infos = []
        for name, label in samples:
            info = dict(img_path=join_path(self.img_prefix, name))
            if self.with_label:
                info["gt_label"] = label
            if groups:
                info["group"] = groups[name]
            infos.append(info)
        return infos

    def _listed_samples(self) -> list[tuple[str, int | None]]:
        """Names and classes in lines `name class`, or names alone."""
        lines = [line for line in list_from_file(self.ann_file) if line.strip()]
        if not self.with_label:
            return [(line, None) for line in lines]
        samples = []
        for line in lines:
            name, _, label = line.rstrip().rpartition(" ")
            samples.append((name, int(label)))
        return samples

    def _find_samples(self) -> list[tuple[str, int | None]]:
        """Names and classes of the images in the folder."""
        names, others = image_names(self.img_prefix, self.part)
        folder = Path(self.img_prefix, self.part)
        if not names:
            raise UserError(
                f"{folder} holds no images ({', '.join(EXTENSIONS)}) but {others_text(others) or 'no files'}"
            )
        if self.tiles:
            names, _ = tile_names(self.img_prefix, names, *self.tiles)
        if not self.with_label:
            return [(name, None) for name in names]
        if self.labels:
            classes = read_labels(self.labels, names)
        else:
            classes = classes_at(names, self.class_level or level_of_classes(names) or 1)
        if not classes:
            raise UserError(f"{folder} has no folder per class: with `with_label=False` it needs none")
        known = self.CLASSES or sorted(set(classes.values()))
        self._metainfo["classes"] = tuple(known)
        number = {name: index for index, name in enumerate(known)}
        unknown = set(classes.values()) - set(known)
        if unknown:
            raise UserError(f"{folder} has classes that `metainfo` lacks: {listed(sorted(unknown), most=5)}")
        samples = [(name, number[label]) for name, label in classes.items()]
        samples.sort(key=lambda sample: (sample[1], sample[0]))  # by class, then by name
        return samples
