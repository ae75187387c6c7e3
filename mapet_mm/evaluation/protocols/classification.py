"""Protocols that learn classes: what can be learnt, which images choose settings, and rows with intervals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from mapet_mm.datasets.groups import draw_share
from mapet_mm.evaluation.features import Features
from mapet_mm.evaluation.images import ImageSet, ImageSetError
from mapet_mm.evaluation.protocol import Evaluated, Protocol
from mapet_mm.evaluation.tables import Row, bootstrap, mean_of_groups

SETS = ("train", "val", "view", "dense_train", "dense_val")  # others are further tests of a classifier
HELD_OUT = 10  # every tenth training image of a class chooses between settings; CAPI takes a tenth, too


def every_tenth(count: int) -> Bool[Tensor, " image"]:
    """True for the tenth of some images, the twentieth, ...; for the last of fewer than ten."""
    return torch.arange(count) % HELD_OUT == min(HELD_OUT, count) - 1


def held_out(
    labels: Int64[Tensor, " image"], groups: Int64[Tensor, " image"] | None = None
) -> Bool[Tensor, " image"]:
    """True for the training images that choose between settings: every tenth of each class.

    Of a class with two to nine images it is the last one; an only image is never held out. Of images in
    groups, whole groups choose, a tenth of the images and at least one group; see `draw_share`.

    Raises:
        ImageSetError: no class has two images, or each group is too large.
    """
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    if groups is not None:
        share = max(1 / HELD_OUT, 1 / len(groups.unique()))
        known = [dict(enumerate(one.tolist())) for one in (labels, groups)]
        chosen[draw_share(range(len(labels)), share, 0, *known)] = True
        if not chosen.any() or chosen.all():
            raise ImageSetError("no group of `train` is small enough to choose settings with")
        return chosen
    by_class = labels.argsort(stable=True).split(labels.bincount().tolist())
    for images in by_class:
        if len(images) > 1:
            chosen[images] = every_tenth(len(images))
    if not chosen.any():
        raise ImageSetError("no class of `train` has two images, so none is left to choose settings with")
    return chosen


def at_edge(value: float, grid: Sequence[float]) -> str:
    """A note that a chosen value is the lowest or highest of several: others may be better."""
    if len(set(grid)) == 1 or min(grid) < value < max(grid):
        return ""
    edge = "lowest" if value == min(grid) else "highest"
    return f" (the {edge} of the grid)"


def further(images: Mapping[str, ImageSet]) -> list[str]:
    """Names of the image sets on which classifiers are tested beside `val`."""
    return [name for name in images if name not in SETS]


def check_labels(train: ImageSet, val: ImageSet) -> int:
    """The number of classes of two image sets that a classifier is trained and tested on.

    Raises:
        ImageSetError: images without labels or with one below 0, one class only, a class of `val` or of the
            dataset without an image in `train`, or classes in another order.
    """
    for images in (train, val):
        if images.labels is None or images.labels.min() < 0:
            raise ImageSetError(
                f"the `{images.name}` images have no labels, or some have none: leave them out, or choose "
                "protocols that need no labels"
            )
    check_class_names(train, val)
    classes = set(train.labels.tolist())
    if len(classes) < 2:
        raise ImageSetError(f"`train` contains only class {classes.pop()}: classification needs two")
    wanted = {*val.labels.tolist(), *range(len(train.class_names or ()))}
    missing = wanted - classes
    if missing:
        raise ImageSetError(f"`train` has no image of class {min(missing)}: add some, or leave the class out")
    return max(classes) + 1


def answers(
    train: ImageSet, test: ImageSet, num_classes: int
) -> tuple[Int64[Tensor, " offered"], Bool[Tensor, "image class"]]:
    """The classes of `train` that a test is between, and which of them are right for each of its images.

    A test with a part of the classes, such as ImageNet-A, is between these; folders named by numbers, as
    ImageNet-V2's, are the classes of these numbers.

    Raises:
        ImageSetError: a class that `train` does not have.
    """
    if test.answers:
        offered = torch.arange(num_classes)
        right = torch.zeros(len(test), num_classes, dtype=torch.bool)
        listed = json.loads(Path(test.answers).read_text())
        for index in range(len(test)):
            number = int(re.findall(r"\d+", test.path(index))[-1])  # of ILSVRC2012_val_00000001.JPEG
            right[index, listed[number - 1]] = True
    else:
        class_of = torch.tensor(classes_in_train(train, test, num_classes))
        offered = class_of.sort().values
        right = torch.zeros(len(test.labels), num_classes, dtype=torch.bool)
        right[torch.arange(len(test.labels)), class_of[test.labels]] = True
    return offered, right


def classes_in_train(train: ImageSet, test: ImageSet, num_classes: int) -> list[int]:
    """The class of `train` that each class of a test is: of the same name, or of the number in its name."""
    names = test.class_names
    known = train.class_names
    if test.name == "val" or not names or not known or names == known:
        return list(range(num_classes))
    index_of = {name: index for index, name in enumerate(known)}
    classes = []
    for name in names:
        index = index_of.get(name, int(name) if name.isdigit() else num_classes)
        if index >= num_classes:
            raise ImageSetError(f"`train` has no class `{name}` of the `{test.name}` images")
        classes.append(index)
    return classes


def check_class_names(train: ImageSet, val: ImageSet) -> None:
    """Raise ImageSetError if an index means different classes in two sets that name their classes."""
    pairs = zip(train.class_names or (), val.class_names or (), strict=False)  # the last ones may be missing
    for index, (known, other) in enumerate(pairs):
        if known != other:
            raise ImageSetError(
                f"class {index} is `{known}` in the `{train.name}` images and `{other}` in the `{val.name}` "
                "images: add the class folder that is missing, or give both sets the same "
                "`metainfo=dict(classes=[...])`"
            )


class Hits(NamedTuple):
    """100 for each image of a set that a scorer classifies right, 0 for others.

    Args:
        hits: of each scorer.
        averaged: a number of each image. A figure is the mean over these: the classes if the set is judged
            per class, else one number of all.
        groups: number of each image's group, if there are any.
    """

    hits: Float64[np.ndarray, "scorer image"]
    averaged: Int64[np.ndarray, " image"]
    groups: Int64[np.ndarray, " image"] | None

    @property
    def figures(self) -> list[float]:
        """The figure of each scorer."""
        return [mean_of_groups(hits, self.averaged) for hits in self.hits]

    @property
    def figure(self) -> float:
        """The mean over the scorers."""
        return float(np.mean(self.figures))

    @property
    def interval(self) -> tuple[float, float]:
        """The figure's 95 %, over images or their groups."""
        return bootstrap(mean_of_groups, self.hits.mean(0), self.averaged, groups=self.groups)


class Classification(Protocol):
    """A protocol that learns the classes of `train` and is tested on `val` and on further image sets."""

    name: ClassVar[str]  # in the table

    kind: ClassVar[str] = "pooled"  # of features that it takes
    layers = 1  # number of last layers that it reads; None for all

    def needs(self, images: Mapping[str, ImageSet]) -> Mapping[str, Sequence[str]]:
        """Further sets as `val`."""
        kind = self.kind
        if kind == "pooled":
            kind = "layers" if self.layers is None else self.layers
        return {name: [kind] for name in ("train", "val", *further(images))}

    def unfit(self, images: Mapping[str, ImageSet], features: Mapping[str, Features]) -> str | None:
        """See `check_labels` and `answers`."""
        num_classes = check_labels(images["train"], images["val"])
        for name in further(images):
            answers(images["train"], images[name], num_classes)
        return None

    def rows_of(
        self,
        evaluated: Evaluated,
        setting: str,
        *scorers: Callable[[Features], Float[Tensor, "image class"]],
        note: str = "",
        detail: bool = False,
    ) -> list[Row]:
        """A row for `val` and one for each further set: top-1 in percent, with an interval.

        Where classes are of unequal size it is the mean over them; see `Evaluated.is_per_class`.
        The scorers give the classes' scores of a set's images; of several, a row has mean and spread. The
        interval is over images, or over their groups if they have any.
        """
        rows = []
        for name in ("val", *further(evaluated.images)):
            found = self.hits(evaluated, name, scorers)
            row = Row(self.name, setting, found.figure, interval=found.interval, note=note, detail=detail)
            if name != "val":
                row = replace(row, setting=f"{setting}, on {name}")
            if evaluated.is_per_class(name):
                row = replace(row, unit="mean per class, %")
            if len(scorers) > 1:
                row = replace(row, spread=float(np.std(found.figures, ddof=1)))
            rows.append(row)
        return rows

    def hits(self, evaluated: Evaluated, name: str, scorers: Sequence[Callable[[Features], Tensor]]) -> Hits:
        """Which of a set's images each scorer classifies right."""
        images = evaluated.images[name]
        offered, right = answers(evaluated.images["train"], images, evaluated.num_classes)
        judged = right.any(1)  # ReaL leaves images without an answer
        hits = []
        for scores in scorers:
            among_offered = scores(evaluated.features[name]).cpu()[:, offered]
            best = offered[among_offered.argmax(1)]
            hits.append(100 * right.gather(1, best[:, None])[judged, 0].double())
        averaged = torch.zeros(len(judged), dtype=torch.int64)
        if evaluated.is_per_class(name):
            averaged = images.labels
        groups = None if images.groups is None else images.groups[judged].numpy()
        return Hits(torch.stack(hits).numpy(), averaged[judged].numpy(), groups)
