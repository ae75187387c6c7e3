"""The labelled images of a fine-tuning, and the part of them that it is measured on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.registry import TRANSFORMS

from mapet_mm.cli.finetuning.options import FinetuneOptions
from mapet_mm.cli.finetuning.split import seen_images, split_labelled
from mapet_mm.datasets.classes import NO_CLASSES
from mapet_mm.datasets.labels import Split, find_images, labels_of
from mapet_mm.datasets.masks import MaskClasses, MaskedImages, match_masks, read_masks, take_values
from mapet_mm.datasets.reading import ImageReader, UndecodableError, in_threads
from mapet_mm.evaluation.metrics.class_sizes import are_unequal
from mapet_mm.utils.atomic_files import replace_json
from mapet_mm.utils.errors import UserError, listed
from mapet_mm.utils.identity import IDENTITY

LISTED = 30  # classes, with their numbers of labels
LEFT_OUT = "left_out.json"  # images that cannot be decoded, each with the reason
MOST_LEFT_OUT = 0.05  # of the images


@dataclass(frozen=True)
class Masks:
    """The masks of labelled images.

    Args:
        folder: of the masks.
        parts: of `train` and `val`, the endings of images and masks, each with its list of images.
        classes: what the values of masks stand for.
    """

    folder: Path
    parts: dict[str, list[tuple[MaskedImages, str]]]
    classes: MaskClasses


@dataclass(frozen=True)
class LabelledImages:
    """Labelled images, split.

    Args:
        folder: that the names are relative to.
        split: of the images.
        classes: their names, in the order of their numbers.
        lists: the lines of each list of images, by its file's name.
        val_groups: of each image that is measured on, in the order of the lists; None without groups.
        val_classes: number of each one's class, if classes are of unequal size: each is to count alike.
        words: lines about all of it.
        masks: None with classes of images.
    """

    folder: Path
    split: Split
    classes: list[str]
    lists: dict[str, list[str]]
    val_groups: list[str] | None
    words: list[str]
    val_classes: np.ndarray | None = None
    masks: Masks | None = None


def look(args: FinetuneOptions, load_image: Mapping[str, Any]) -> LabelledImages:
    """Count the labels, say what they are taken for, and hold some images out.

    Args:
        args: of the command.
        load_image: the pipeline's step that reads an image.

    Raises:
        UserError: no images, no classes, or too few images; or what is wrong with which mask.
    """
    if args.images is not None:
        return _look_at_images(args, load_image)
    return _look_at_masks(args, load_image)


def _look_at_images(args: FinetuneOptions, load_image: Mapping[str, Any]) -> LabelledImages:
    """Images whose folders, or lines of a file, are classes."""
    names, left_out = find_images(args.images)
    labels = labels_of(names, args.labels, args.class_level, args.groups)
    class_of = labels.classes
    if not class_of:
        raise UserError(
            f"{args.images}: {labels.about_classes}: the images of a class lie in a folder of its name"
        )
    broken = undecodable([name for name in names if name in class_of], args.images, args.out, load_image)
    labelled = replace(labels, names=[name for name in names if name in class_of and name not in broken])
    seen = seen_images(args.run, args.images, labelled.names)
    split, about_split = split_labelled(labelled, args.images, args.seed, seen)

    classes = sorted({class_of[name] for name in [*split.trained, *split.held_out]})
    numbers = {name: number for number, name in enumerate(classes)}
    lists = {}
    for part, of_part in (("train", split.trained), ("val", split.held_out)):
        lists[f"{part}.txt"] = [f"{name} {numbers[class_of[name]]}" for name in of_part]
    val_groups = [labels.groups[name] for name in split.held_out] if labels.groups else None

    words = [f"images: {len(names)}; {labels.about_classes}"]
    if left_out:
        words.append(f"other files, left out: {left_out}")
    if broken:
        words.append(left_out_line(broken, args.out))
    if labels.about_groups:
        words.append(labels.about_groups)
    counts = Counter(class_of[name] for name in split.trained)
    shown = ", ".join(f"{name}: {counts[name]}" for name in classes[:LISTED])
    if len(classes) > LISTED:
        shown += f", ... {len(classes) - LISTED} more"
    words += [f"labels to train on, by class: {shown}", *about_split]
    val_classes = None
    if are_unequal(torch.tensor([counts[name] for name in classes])):
        val_classes = np.array([numbers[class_of[name]] for name in split.held_out])
        words.append(
            "classes are of unequal size: the figure is the mean over them; the training weighs images alike"
        )
    untrained = [name for name in classes if not counts[name]]
    if untrained:
        words.append(f"no image to train on has the class {listed(untrained, 5)}: none can be found")
    return LabelledImages(args.images, split, classes, lists, val_groups, words, val_classes)


def left_out_line(broken: set[str], out: Path) -> str:
    """A line about images that cannot be decoded."""
    return f"images that cannot be decoded, left out: {len(broken)}, see {out / LEFT_OUT}"


def undecodable(names: Sequence[str], folder: Path, out: Path, load_image: Mapping[str, Any]) -> set[str]:
    """The images that cannot be decoded, which no training shall meet after hours; OUT keeps their list.

    Another start of a fine-tuning whose lists were written reads it.

    Raises:
        UserError: more than a twentieth cannot be, or the storage gives errors.
    """
    listing = out / LEFT_OUT
    if listing.exists() and (out / IDENTITY).exists():
        return set(json.loads(listing.read_text()))
    read = ImageReader(TRANSFORMS.build(dict(load_image)))

    def reason_against(name: str) -> str:
        try:
            read(dict(img_path=str(folder / name)))
        except UndecodableError as error:
            return str(error)
        return ""

    reasons = dict(zip(names, in_threads(reason_against, names, "decoding each image once"), strict=True))
    broken = {name: reason for name, reason in reasons.items() if reason}
    if len(broken) > MOST_LEFT_OUT * len(names):
        named = [f"{folder / name} ({reason})" for name, reason in broken.items()]
        raise UserError(
            f"{len(broken)} of {len(names)} images cannot be decoded: {listed(named, most=20)}: repair or "
            f"remove them, up to {MOST_LEFT_OUT:.0%} are left out"
        )
    replace_json(listing, broken)
    return set(broken)


def _look_at_masks(args: FinetuneOptions, load_image: Mapping[str, Any]) -> LabelledImages:
    """Images with masks; see `match_masks`, `read_masks` and `take_values`."""
    images, masks = args.masks
    pairs, words = match_masks(images, masks)
    names = sorted(name + pair.image_ending for pair in pairs for name in pair.names)
    labels = labels_of(names, class_level=NO_CLASSES, groups=args.groups)
    seen = seen_images(args.run, images, names)
    split, about_split = split_labelled(labels, images, args.seed, seen)
    num_train = len(split.trained)
    if num_train <= args.processes:
        raise UserError(
            f"{images}: {num_train} images to train on are too few for {args.processes} processes, each of "
            f"which takes two in a step (BatchNorm): add --processes {num_train - 1}"
        )
    # All that the names say is said: to read the images and the masks may take long.
    broken = undecodable(names, images, args.out, load_image)
    if broken:
        words.append(left_out_line(broken, args.out))
        pairs = [pair.without(broken) for pair in pairs]
        pairs = [pair for pair in pairs if pair.names]
        labels = replace(labels, names=[name for name in names if name not in broken])
        split, about_split = split_labelled(labels, images, args.seed, seen)
    classes = take_values(read_masks(pairs, images, masks, load_image), args.ignore)
    words += classes.words
    if labels.about_groups:
        words.append(labels.about_groups)

    lists: dict[str, list[str]] = {}
    parts: dict[str, list[tuple[MaskedImages, str]]] = {"train": [], "val": []}
    measured = []
    for part, of_part in (("train", split.trained), ("val", split.held_out)):
        kept = set(of_part)
        for pair in pairs:
            own = [name for name in pair.names if name + pair.image_ending in kept]
            if not own:
                continue
            number = len(parts[part])
            file = f"{part}_{number}.txt" if number else f"{part}.txt"
            lists[file] = own
            parts[part].append((pair, file))
            if part == "val":
                measured += [name + pair.image_ending for name in own]
    val_groups = [labels.groups[name] for name in measured] if labels.groups else None
    words += about_split
    found = Masks(masks, parts, classes)
    return LabelledImages(images, split, classes.names, lists, val_groups, words, masks=found)
