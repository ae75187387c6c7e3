"""The part of labelled images that a fine-tuning is measured on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from mapet_mm.datasets.classes import TRAIN, VAL
from mapet_mm.datasets.groups import draw_share
from mapet_mm.datasets.labels import Labels, Split, split_images
from mapet_mm.datasets.seen import WARNING, pretrained_on
from mapet_mm.utils.errors import UserError, listed
from mapet_mm.utils.run_folder import Run

SHARE = 0.2  # of the images, that is held out
# Images that are new to the pre-training are held out alone if there are so many, or such a share of all, and
# some of each class of so many.
NEW = 1000
NEW_SHARE = 0.05
NEW_CLASS = 20


def seen_images(run: Path, folder: Path, names: Sequence[str]) -> set[str]:
    """The images of a folder, by their names in it, that RUN was pre-trained on."""
    path_of = {name: str(folder / name) for name in names}
    seen = pretrained_on(Run(run), path_of.values())
    return {name for name, path in path_of.items() if path in seen}


def draw_fifth(
    labels: Labels, together: Mapping[str, str], seed: int, seen: Collection[str]
) -> tuple[list[str], str]:
    """Draw a fifth of each class, if enough images are new to the pre-training of these alone.

    Args:
        labels: of the images.
        together: of each image, its group, or the image that it is a copy of.
        seed: of the draw.
        seen: names of images that were pre-trained on.

    Returns:
        Names, and words for what they are.
    """
    share = SHARE
    candidates = labels.names
    what = "a fifth"
    known = {together[name] for name in labels.names if name in seen}
    new = [name for name in labels.names if together[name] not in known]
    counts = Counter(labels.classes[name] for name in labels.names if name in labels.classes)
    classes = {name for name, count in counts.items() if count >= NEW_CLASS}
    enough = len(new) >= min(NEW, NEW_SHARE * len(labels.names))
    if known and enough and classes <= {labels.classes.get(name) for name in new}:
        share = min(1.0, SHARE * len(labels.names) / len(new))
        candidates = new
        what = "which the pre-training did not see"
    drawn = draw_share(candidates, share, seed, labels.classes, together)
    if not drawn:  # all groups are larger
        sizes = Counter(together.values())
        smallest = min(sizes, key=lambda group: (sizes[group], group))
        drawn = [name for name in labels.names if together[name] == smallest]
    return drawn, what


def split_labelled(
    labels: Labels, folder: Path, seed: int, seen: Collection[str] = ()
) -> tuple[Split, list[str]]:
    """Split images by the folders `train` and `val`; without these hold a fifth out, whole groups alone.

    Nothing that is measured on has a copy, or with groups an image of its group, among what is trained on. If
    there are enough images that the pre-training has not seen, these alone are held out, a fifth at most.

    Args:
        labels: of the images.
        folder: of the images.
        seed: of the draw.
        seen: names of images that were pre-trained on, without labels.

    Returns:
        The split, and lines about it.

    Raises:
        UserError: nothing is left to train on, or to measure on.
    """
    together = labels.groups or labels.originals(folder)
    part_of = {name: name.partition("/")[0].lower() for name in labels.names}
    train = [name for name in labels.names if part_of[name] in TRAIN]
    val = [name for name in labels.names if part_of[name] in VAL]
    if train and val:
        split = Split(split_images(train, together, val).trained, val)
        words = [f"split by folders: {len(train)} images to train on, {len(val)} held out"]
        outside = len(labels.names) - len(train) - len(val)
        if outside:
            words.append(f"images outside of train and val, left out: {outside}")
        num_near = len(train) - len(split.trained)
        if num_near:
            what = "copies of held-out images"
            if labels.groups:
                what = f"of groups that are held out ({listed(sorted({together[name] for name in val}), 3)})"
            words.append(f"images to train on that are {what}, left out: {num_near} of {len(train)}")
    else:
        drawn, what = draw_fifth(labels, together, seed, seen)
        split = split_images(labels.names, together, drawn)
        if labels.groups:
            held_out = sorted({together[name] for name in drawn})
            what = f"{len(held_out)} whole groups ({listed(held_out, 3)})"
        words = [f"held out, to measure on: {len(split.held_out)} of {len(labels.names)} images, {what}"]
    if len(split.trained) < 2 or not split.held_out:
        counts = f"{len(split.trained)} images to train on and {len(split.held_out)} held out"
        raise UserError(f"{folder}: {counts}: label more")
    num_seen = len(set(split.held_out).intersection(seen))
    if num_seen:
        words.append(f"{num_seen} of the {len(split.held_out)} held-out images were {WARNING}")
    return split, words
