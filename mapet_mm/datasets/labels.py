"""What is known of the images of a folder, their classes and groups; and splits that keep to it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mapet_mm.datasets.classes import classes_of
from mapet_mm.datasets.copies import first_copies
from mapet_mm.datasets.groups import groups_of
from mapet_mm.datasets.image_folder import EXTENSIONS, UNLISTED, image_names, others_text
from mapet_mm.utils.errors import UserError


def find_images(folder: Path) -> tuple[list[str], str]:
    """Names of the images below a folder that a list can hold, a line each, and words for the other files.

    Raises:
        UserError: there are none.
    """
    root = str(folder.absolute())
    found, others = image_names(folder)
    names = [name for name in found if not re.search("[\n\r\udc80-\udcff]", f"{root}/{name}")]
    if len(names) < len(found):
        others[UNLISTED] += len(found) - len(names)
    left_out = others_text(others)
    if not names:
        raise UserError(f"{folder} holds no images ({', '.join(EXTENSIONS)}) but {left_out or 'no files'}")
    return names, left_out


@dataclass(frozen=True)
class Labels:
    """The class and the group of each image.

    Args:
        names: of the images, relative to their folder.
        classes: of the images that have one; empty without classes.
        groups: of all images, which no split parts; empty without groups.
        about_classes: words for the classes, or for why there are none.
        about_groups: words for the groups; empty without groups.
    """

    names: Sequence[str]
    classes: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    about_classes: str = ""
    about_groups: str = ""

    @property
    def about(self) -> str:
        """Words for groups and classes."""
        return "; ".join(filter(None, [self.about_groups, self.about_classes]))

    def originals(self, folder: str | Path) -> dict[str, str]:
        """For each image the one that it is a copy of, or itself; of copies, one with a class comes first."""
        ordered = sorted(self.names, key=lambda name: (name not in self.classes, name))
        first = first_copies([os.path.join(folder, name) for name in ordered])
        return {name: ordered[index] for name, index in zip(ordered, first, strict=True)}


def labels_of(
    names: Sequence[str],
    labels: str | Path | None = None,
    class_level: int | None = None,
    groups: str | int | Path | None = None,
) -> Labels:
    """What is known of the images of a folder.

    Args:
        names: of the images, relative to the folder.
        labels: file of lines `name class`; None takes the folders.
        class_level: level of the folders that are classes; see `classes_of`.
        groups: level of folders, or file of lines `name group`; see `groups_of`.

    Raises:
        UserError: classes or groups that are asked for and are none, or files that do not suit.

    Examples:
        >>> found = labels_of(["cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png"])
        >>> found.classes["dog/1.png"], dict(found.groups)
        ('dog', {})
    """
    group_of, about_groups = groups_of(groups, names)
    class_of, about_classes = classes_of(labels, names, class_level, group_of)
    return Labels(names, class_of or {}, group_of or {}, about_classes, about_groups)


@dataclass(frozen=True)
class Split:
    """Names of the images that are trained on, and of those that are held out to measure on."""

    trained: list[str]
    held_out: list[str]


def split_images(names: Sequence[str], together: Mapping[str, str], drawn: Collection[str]) -> Split:
    """Hold the drawn images out, and with them whatever belongs together.

    Args:
        names: of all images.
        together: of each image, its group, or the image that it is a copy of.
        drawn: some of the images.
    """
    out = {together[name] for name in drawn}
    trained = [name for name in names if together[name] not in out]
    held_out = [name for name in names if together[name] in out]
    return Split(trained, held_out)
