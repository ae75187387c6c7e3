"""The labels that a fine-tuning has, and the part of them that it is measured on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mapet_mm.cli.verdict import originals
from mapet_mm.datasets.classes import classes_of
from mapet_mm.datasets.groups import draw_share, groups_of
from mapet_mm.datasets.image_folder import EXTENSIONS, image_names, others_text
from mapet_mm.datasets.masks import MaskClasses, MaskedImages, match_masks, read_masks, take_values
from mapet_mm.utils.errors import UserError, listed

SHARE = 0.2  # of the images, that is held out
LISTED = 30  # classes, with their numbers of labels
SAMPLE = 200  # images, whose size is looked at
PARTS = ("train", "val")
TRAIN = ("train", "training")
VAL = ("val", "valid", "validation")


@dataclass(frozen=True)
class Split:
    """Names of the images to train on and to measure on, their groups, and lines about them."""

    train: list[str]
    val: list[str]
    groups: Mapping[str, str] | None = None
    words: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Labels:
    """Labelled images, split.

    Args:
        images: folder that the names are relative to.
        split: of the images.
        classes: their names, in the order of their numbers.
        class_of: of each image; empty with masks.
        masks: folder of the masks; None with classes of images.
        pairs: images and masks, by their endings.
        mask_classes: what the values of masks stand for.
        words: lines about all of it.
    """

    images: Path
    split: Split
    classes: list[str]
    words: list[str]
    class_of: Mapping[str, str] = field(default_factory=dict)
    masks: Path | None = None
    pairs: Sequence[MaskedImages] = ()
    mask_classes: MaskClasses | None = None

    def lists(self) -> dict[str, list[str]]:
        """The lines of each list of images, by its file's name."""
        made = {}
        for part in PARTS:
            if self.masks is None:
                numbers = {name: number for number, name in enumerate(self.classes)}
                made[f"{part}.txt"] = [
                    f"{name} {numbers[self.class_of[name]]}" for name in getattr(self.split, part)
                ]
            for pair, file in self.masked_images(part):
                made[file] = self._of_pair(part, pair)
        return made

    def masked_images(self, part: str) -> list[tuple[MaskedImages, str]]:
        """The endings of a part's images and masks, each pair with its list of images."""
        found = [pair for pair in self.pairs if self._of_pair(part, pair)]
        return [
            (pair, f"{part}_{number}.txt" if number else f"{part}.txt") for number, pair in enumerate(found)
        ]

    def _of_pair(self, part: str, pair: MaskedImages) -> list[str]:
        """A part's images of a pair of endings, without the ending."""
        kept = set(getattr(self.split, part))
        return [name for name in pair.names if name + pair.image_ending in kept]

    def val_groups(self) -> list[str] | None:
        """The group of each image that is measured on, in the order of the lists; None without groups."""
        if self.split.groups is None:
            return None
        ordered = self.split.val
        if self.masks is not None:
            ordered = []
            for pair, _ in self.masked_images("val"):
                ordered += [name + pair.image_ending for name in self._of_pair("val", pair)]
        return [self.split.groups[name] for name in ordered]


def look_at_images(folder: Path, groups: str | None, seed: int) -> Labels:
    """Count the images of each folder, and hold some out.

    Raises:
        UserError: no images, no folders that are classes, or too few images.
    """
    names, others = image_names(folder)
    if not names:
        raise UserError(f"{folder} holds no images ({', '.join(EXTENSIONS)}) but {others_text(others)}")
    group_of, about_groups = groups_of(groups, names)
    class_of, about = classes_of(None, names, None, group_of)
    if class_of is None:
        raise UserError(f"{folder}: {about}: the images of a class lie in a folder of its name")
    labelled = [name for name in names if name in class_of]
    split = split_images(labelled, folder, class_of, group_of, seed)
    counts = Counter(class_of[name] for name in split.train)
    classes = sorted({class_of[name] for name in [*split.train, *split.val]})
    shown = [f"{name}: {counts[name]}" for name in classes[:LISTED]]
    more = f", ... {len(classes) - LISTED} more" if len(classes) > LISTED else ""
    words = [f"images: {len(names)}; {about}"]
    if others:
        words.append(f"other files, left out: {others_text(others)}")
    words += [about_groups] if about_groups else []
    words += [f"labels to train on, by class: {', '.join(shown)}{more}", *split.words]
    untrained = [name for name in classes if not counts[name]]
    if untrained:
        words.append(f"no image to train on has the class {listed(untrained, 5)}: none can be found")
    return Labels(folder, split, classes, words, class_of)


def look_at_masks(
    images: Path,
    masks: Path,
    ignore: Sequence[int] | None,
    groups: str | None,
    seed: int,
    load_image: Mapping[str, Any],
) -> Labels:
    """Read all masks, say what they are taken for, and hold some out.

    Raises:
        UserError: what is wrong with which mask; see `match_masks`, `read_masks` and `take_values`.
    """
    pairs, words = match_masks(images, masks)
    found = read_masks(pairs, images, masks, load_image)
    mask_classes = take_values(found, ignore)
    names = sorted(name + pair.image_ending for pair in pairs for name in pair.names)
    group_of, about_groups = groups_of(groups, names)
    split = split_images(names, images, None, group_of, seed)
    words += mask_classes.words
    words += [about_groups] if about_groups else []
    return Labels(
        images,
        split,
        mask_classes.names,
        [*words, *split.words],
        masks=masks,
        pairs=pairs,
        mask_classes=mask_classes,
    )


def split_images(
    names: Sequence[str],
    folder: Path,
    classes: Mapping[str, str] | None,
    groups: Mapping[str, str] | None,
    seed: int,
) -> Split:
    """Split images by the folders `train` and `val`; without these hold a fifth out, whole groups alone.

    Nothing that is measured on has a copy, or with groups an image of its group, among what is trained on.

    Raises:
        UserError: nothing is left to train on, or to measure on.
    """
    parts = {name: name.partition("/")[0].lower() for name in names}
    train = [name for name in names if parts[name] in TRAIN]
    val = [name for name in names if parts[name] in VAL]
    together = groups or originals(names, folder, classes)
    if train and val:
        words = [f"split by folders: {len(train)} images to train on, {len(val)} held out"]
        outside = len(names) - len(train) - len(val)
        if outside:
            words.append(f"images outside of train and val, left out: {outside}")
        held_out = {together[name] for name in val}
        too_near = [name for name in train if together[name] in held_out]
        if too_near:
            what = "copies of held-out images"
            if groups:
                what = f"of groups that are held out ({listed(sorted(held_out), 3)})"
            words.append(f"images to train on that are {what}, left out: {len(too_near)} of {len(train)}")
            train = [name for name in train if together[name] not in held_out]
    else:
        drawn = _held_out_groups(names, classes, together, seed)
        train = [name for name in names if together[name] not in drawn]
        val = [name for name in names if together[name] in drawn]
        what = f"{len(drawn)} whole groups ({listed(sorted(drawn), 3)})" if groups else "a fifth"
        words = [f"held out, to measure on: {len(val)} of {len(names)} images, {what}"]
    if len(train) < 2 or not val:
        raise UserError(f"{folder}: {len(train)} images to train on and {len(val)} held out: label more")
    return Split(train, val, groups, words)


def _held_out_groups(
    names: Sequence[str], classes: Mapping[str, str] | None, together: Mapping[str, str], seed: int
) -> set[str]:
    """The groups that are held out: of about a fifth of the images; the smallest if all are larger."""
    drawn = draw_share(names, SHARE, seed, classes, together)
    if drawn:
        return {together[name] for name in drawn}
    sizes = Counter(together.values())
    return {min(sizes, key=lambda group: (sizes[group], group))}


def short_side(labels: Labels) -> int:
    """The median of the images' short sides, in pixels."""
    names = labels.split.train
    chosen = np.unique(np.linspace(0, len(names) - 1, SAMPLE).astype(int)).tolist()
    sides = []
    for index in chosen:
        with Image.open(labels.images / names[index]) as image:
            sides.append(min(image.size))
    return int(np.median(sides))
