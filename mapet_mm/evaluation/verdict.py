"""The verdict on a pre-training: its weights beside those that it started from, and beside random ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int64

from mapet_mm.evaluation.extraction import require_few_left_out, take_features
from mapet_mm.evaluation.images import ImageSet
from mapet_mm.evaluation.metrics.neighbours import SHOTS, suiting_k, too_few_voters
from mapet_mm.evaluation.metrics.rank_me import alignment, rank_me
from mapet_mm.evaluation.models import RANDOM, Model
from mapet_mm.evaluation.protocol import Evaluated
from mapet_mm.evaluation.protocols.classification import Hits, check_labels
from mapet_mm.evaluation.protocols.knn import NearestNeighbours
from mapet_mm.evaluation.protocols.label_free import sampled_uniformity
from mapet_mm.evaluation.protocols.regression import LowShot, fitted_scaler
from mapet_mm.evaluation.tables import bootstrap, figure_text, mean_of_groups
from mapet_mm.evaluation.twins import twins_sentence
from mapet_mm.utils.tables import Column, Table

RESULT = "this pre-training"
START = "its start"
FEW = 20  # images or groups; of fewer, a bootstrapped interval is too narrow
FEWEST_OF_CLASS = 5  # images, where each class counts as one; of 2 an interval covers 73 instead of 95 %
FEWEST_GROUPS = 5  # to be tested, for a verdict by labels
Interval = tuple[float, float]


@dataclass(frozen=True)
class Gain:
    """A figure's difference between two models on the same images, with its 95 % interval."""

    points: float
    interval: Interval

    @property
    def text(self) -> str:
        """'+6.1 [+3.9, +8.2]'."""
        low, high = self.interval
        return f"{self.points:+.1f} [{low:+.1f}, {high:+.1f}]"


@dataclass(frozen=True)
class Measure:
    """One line of the verdict."""

    name: str  # 'k-NN, top-1 (%)'
    values: Mapping[str, float]  # by model
    intervals: Mapping[str, Interval] = field(default_factory=dict)  # 95 %, over images
    gain: Gain | None = None  # of the result over the model that it is compared with

    def text(self, model: str) -> str | None:
        """A model's figure, '81.2 [80.1, 82.4]'; None if it has none."""
        if model not in self.values:
            return None
        return figure_text(self.values[model], interval=self.intervals.get(model))


@dataclass(frozen=True)
class Verdict:
    """What a pre-training is worth, by measures of frozen features."""

    compared_with: str  # `START`, or `RANDOM` if there is no other start
    measures: Sequence[Measure]
    sentence: str
    num_images: int  # that are measured on
    num_groups: int | None = None  # that these are in, if they are in groups
    smallest_class: int | None = None  # images of it, where classes count alike

    def as_json(self) -> dict[str, Any]:
        """All of it, with the table."""
        return {**asdict(self), "table": self.table._asdict()}

    @property
    def table(self) -> Table:
        """The measures, one a line."""
        models = list(dict.fromkeys(name for measure in self.measures for name in measure.values))
        has_gains = any(measure.gain for measure in self.measures)
        columns = [Column("measure"), *map(Column, models)]
        if has_gains:
            columns.append(Column(f"gain over {self.compared_with}"))
        rows = []
        for measure in self.measures:
            cells = [measure.text(name) for name in models]
            if has_gains:
                cells.append(measure.gain and measure.gain.text)
            rows.append([measure.name, *cells])
        notes = []
        if has_gains:
            number, what = self.num_images, "images"
            if self.num_groups is not None:
                number, what = self.num_groups, "groups of images"
            notes.append(f"[low, high]: 95 % interval over the held-out {what}; that of a gain is paired.")
            if self.smallest_class is not None and self.smallest_class < FEWEST_OF_CLASS:
                number, what = self.smallest_class, "images of a class"
            if number < FEW:
                notes.append(f"Of {number} {what} an interval is too narrow: do not rely on it.")
        return Table(columns, rows, notes)


def judge(
    models: Mapping[str, tuple[Model, Mapping[str, ImageSet]]],
    cache: Path,
    token_accuracy: float | None = None,
) -> Verdict:
    """Compare a pre-training with its start or, without one, with random weights of the same network.

    With labels by k-NN (the last layer's class token and patch mean, k of `suiting_k`) and by ten labels a
    class, each class alike if they are of unequal size; without labels, or with too few to vote, by RankMe,
    uniformity and alignment.

    Args:
        models: `RESULT`, perhaps `START`, and `RANDOM`, each with its images: `val`, held out of the
            pre-training, and with labels `train`, whose images vote; without labels perhaps `view`, a second
            view of `val`.
        cache: folder of the features.
        token_accuracy: of the pre-training on held-out images, in percent.

    Raises:
        UserError: labels that do not suit.
    """
    compared_with = START if START in models else RANDOM
    if not want_of_labels(models[RESULT][1]):
        for _, images in models.values():  # before hours of features
            check_labels(images["train"], images["val"])
    evaluated = {}
    for name, (model, images) in models.items():
        features = {one: take_features(model, images[one], cache) for one in images}
        require_few_left_out(images.values())
        evaluated[name] = Evaluated(features, images, model.backbone.device)
    images = models[RESULT][1]
    reason = want_of_labels(images)
    if reason:
        measures = label_free_measures(evaluated)
        rank = measures[0].values
        sentence = (
            f"Weak evidence only, {reason}: RankMe is {rank[RESULT]:.1f}, and "
            f"{rank[compared_with]:.1f} of {compared_with}. "
            "A folder per class, or --labels FILE, with ten images of each class, and with --groups five of "
            "them to test, would say more."
        )
    else:
        measures = labelled_measures(evaluated, compared_with)
        sentence = sentence_of(measures[0].gain, compared_with)
        about_twins = twins_sentence(evaluated[RESULT], evaluated.get(START))
        if about_twins:
            sentence = f"{sentence} {about_twins}"
    if token_accuracy is not None:
        measures.append(Measure("held-out token accuracy (%)", {RESULT: token_accuracy}))
    groups = images["val"].groups
    num_groups = None if groups is None else len(groups.unique())
    smallest_class = None
    if not reason and evaluated[RESULT].is_per_class("val"):
        smallest_class = int(images["val"].labels.unique(return_counts=True)[1].min())
    return Verdict(compared_with, measures, sentence, len(images["val"]), num_groups, smallest_class)


def want_of_labels(images: Mapping[str, ImageSet]) -> str:
    """Why nothing can be measured by labels; empty if there are enough to learn from and to be tested on."""
    groups = images["val"].groups
    num_groups = FEWEST_GROUPS if groups is None else len(groups.unique())
    if num_groups == 1:
        return "because one group to test is too few"
    if num_groups < FEWEST_GROUPS:
        return f"because {num_groups} groups to test are too few"
    if any(name not in images or images[name].labels is None for name in ("train", "val")):
        return "for want of labels"
    num_voters = len(images["train"].labels)
    num_classes = len(images["train"].labels.unique())
    if too_few_voters(num_voters, num_classes):
        return f"because {num_voters} images to vote are too few for {num_classes} classes"
    return ""


def labelled_measures(evaluated: Mapping[str, Evaluated], compared_with: str) -> list[Measure]:
    """k-NN and, where each class has images enough, ten labels a class."""
    found: dict[str, dict[str, Hits]] = defaultdict(dict)
    for name, one in evaluated.items():
        for measure, hits in hits_of(one).items():
            found[measure][name] = hits
    return [measure_of(name, hits, compared_with) for name, hits in found.items()]


def hits_of(evaluated: Evaluated) -> dict[str, Hits]:
    """What is classified right, by the name of the measure."""
    figure = "mean per class (%)" if evaluated.is_per_class("val") else "top-1 (%)"
    hits = {f"k-NN, {figure}": knn_hits(evaluated)}
    few = LowShot()
    scorers = few.scorers(evaluated, SHOTS, fitted_scaler(evaluated.features["train"]))
    if scorers:
        # Where each class has no more than these, all draws would be the same images.
        drawn = ", one draw: there are no more" if len(scorers) == 1 else ""
        what = "labels" if evaluated.images["train"].groups is None else "groups"
        hits[f"{SHOTS} {what} a class{drawn}, {figure}"] = few.hits(evaluated, "val", scorers)
    return hits


def knn_hits(evaluated: Evaluated) -> Hits:
    """Which held-out images k-NN classifies right."""
    train = evaluated.features["train"]
    neighbours = NearestNeighbours(k=suiting_k(len(train)))
    votes = partial(neighbours.votes, evaluated, train.settings[-1])
    return neighbours.hits(evaluated, "val", [votes])


def measure_of(name: str, hits: Mapping[str, Hits], compared_with: str) -> Measure:
    """A figure of each model, and the gain, if there is another model to compare with."""
    values = {model: own.figure for model, own in hits.items()}
    intervals = {model: own.interval for model, own in hits.items()}
    gain = None
    if compared_with in hits:
        result, other = (hits[model].hits.mean(0) for model in (RESULT, compared_with))
        gain = paired_gain(result, other, hits[RESULT].groups, hits[RESULT].averaged)
    return Measure(name, values, intervals, gain)


def paired_gain(
    result: Float[np.ndarray, " image"],
    other: Float[np.ndarray, " image"],
    groups: Int64[np.ndarray, " image"] | None = None,
    classes: Int64[np.ndarray, " image"] | None = None,
) -> Gain:
    """The mean of the images' differences, with an interval by the bootstrap over images, or their groups.

    Both models are resampled together: images that are easy or hard for both do not widen the interval.

    Args:
        result, other: 100 for an image that is classified right, 0 for others.
        groups: number of each image's group.
        classes: number of each image's class, for the mean over classes.
    """
    difference = result - other
    if classes is None:
        classes = np.zeros(len(difference), np.int64)
    interval = bootstrap(mean_of_groups, difference, classes, groups=groups)
    return Gain(mean_of_groups(difference, classes), interval)


def sentence_of(gain: Gain, compared_with: str, figure: str = "k-NN") -> str:
    """The verdict in words, by a figure in percent."""
    low, high = gain.interval
    if low > 0:
        return (
            f"Pre-training gains {gain.points:.1f} points of {figure} ({low:.1f} to {high:.1f}) over "
            f"{compared_with}."
        )
    if high < 0:
        return (
            f"Worse: pre-training loses {-gain.points:.1f} points of {figure} ({-high:.1f} to {-low:.1f}) "
            f"against {compared_with}."
        )
    other = "the start's weights" if compared_with == START else compared_with
    return f"No gain seen over {other} ({figure} {gain.points:+.1f} points, {low:+.1f} to {high:+.1f})."


def label_free_measures(evaluated: Mapping[str, Evaluated]) -> list[Measure]:
    """RankMe, uniformity and, with a second view, alignment of the features that k-NN would compare."""
    values_by_measure: dict[str, dict[str, float]] = defaultdict(dict)
    for name, one in evaluated.items():
        val = one.features["val"]
        setting = val.settings[-1]
        features = val.pooled(setting)
        values_by_measure["RankMe (effective rank)"][name] = rank_me([features])
        if len(features) > 1:
            uniformity = sampled_uniformity(features)
            values_by_measure["uniformity (lower: more evenly spread)"][name] = uniformity
        if "view" in one.features:
            agreement = alignment(features, one.features["view"].pooled(setting))
            values_by_measure["alignment (lower: views agree more)"][name] = agreement
    return [Measure(name, values) for name, values in values_by_measure.items()]
