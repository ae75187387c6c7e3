"""Groups of images that belong together, as a patient's, a clip's or a slide's: no split parts them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mapet_mm.datasets.classes import NAMED, classes_at, read_table
from mapet_mm.structures.image_files import file_of
from mapet_mm.utils.errors import UserError, listed

Image = TypeVar("Image", str, int)  # its name, or its index


def groups_of(groups: str | int | Path | None, names: Sequence[str]) -> tuple[dict[str, str] | None, str]:
    """The group of each image, and words for it; None without groups. Tiles of a file are always one.

    Args:
        groups: a level of folders, 1 for those directly in the folder of images, or a file of lines
            `name group`. Folders of one name are one group wherever they are: `T1/patient7` and
            `T2/patient7` are one patient. An image that is not so deep is a group of its own. None takes the
            files, if the images are tiles.
        names: of the images, relative to their folder.

    Raises:
        UserError: a file that does not suit, or all images are in one group.

    Examples:
        >>> groups_of(1, ["anna/1.png", "anna/2.png", "ben/1.png"])[0]
        {'anna/1.png': 'anna', 'anna/2.png': 'anna', 'ben/1.png': 'ben'}
    """
    if groups is None:
        files = {name: file_of(name) for name in names}
        are_tiles = any(name != file for name, file in files.items())
        return (files, "tiles of one file are one group") if are_tiles else (None, "")
    found = read_groups(groups, names)
    distinct = sorted(set(found.values()))
    if len(distinct) < 2:
        raise UserError(f"--groups {groups}: all images are in one group, {listed(distinct, most=1)}")
    source = f"the folders at level {groups}" if str(groups).isdecimal() else f"of {groups}"
    return found, f"{len(distinct)} groups ({listed(distinct, most=NAMED)}), {source}"


def read_groups(groups: str | int | Path, names: Sequence[str]) -> dict[str, str]:
    """The group of each image, which may be one of all; see `groups_of`."""
    text = str(groups)
    if text == "0":
        raise UserError("--groups 0: levels of folders begin with 1")
    if not text.isdecimal():
        return read_table(text, names, "group", "--groups")
    folders = classes_at(names, int(text))
    return {name: folders.get(name, file_of(name)) for name in names}


def shuffled_classes(
    images: Collection[Image], classes: Mapping[Image, Any] | None, seed: int
) -> list[list[Image]]:
    """The images of each class in random order; all in one list without classes."""
    by_class = defaultdict(list)
    for image in sorted(images):
        by_class[(classes or {}).get(image, "")].append(image)
    random = np.random.default_rng(seed)
    return [[own[index] for index in random.permutation(len(own))] for _, own in sorted(by_class.items())]


def draw_share(
    images: Collection[Image],
    share: float,
    seed: int,
    classes: Mapping[Image, Any] | None = None,
    groups: Mapping[Image, Any] | None = None,
) -> list[Image]:
    """A share of the images in random order, whole groups alone: as near to it in each class as can be.

    What rounding takes from a class it gives to the next: of small classes, every second or third has one.
    A group with images of several classes counts for that of most of them.

    Args:
        images: their names or indices.
        share: of the images, between 0 and 1.
        seed: of the draw.
        classes: of all images, if there are any.
        groups: of all images; without groups each image is one.
    """
    members = defaultdict(list)
    for image in sorted(images):
        members[groups[image] if groups else image].append(image)
    main_class = {}
    for group, own in members.items():
        counts = Counter((classes or {}).get(image, "") for image in own)
        main_class[group] = counts.most_common(1)[0][0]

    chosen: list[Image] = []
    num_passed = 0
    for of_class in shuffled_classes(members, main_class, seed):
        num_passed += sum(len(members[group]) for group in of_class)
        wanted = round(share * num_passed)
        for group in of_class:
            if len(chosen) + len(members[group]) / 2 <= wanted:
                chosen += members[group]
    order = np.random.default_rng(seed).permutation(len(chosen))
    return [chosen[index] for index in order]


def groups_in_turn(names: Sequence[str], groups: Mapping[str, str] | None) -> list[str]:
    """The images in an order in which each group has one before any has a second."""
    if not groups:
        return list(names)
    counts: Counter[str] = Counter()
    ranked = []
    for name in names:
        ranked.append((counts[groups[name]], name))
        counts[groups[name]] += 1
    return [name for _, name in sorted(ranked, key=lambda pair: pair[0])]
