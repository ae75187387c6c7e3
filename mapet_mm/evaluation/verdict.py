"""The verdict on a pre-training: its weights beside those that it started from, and beside random ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int64

from mapet_mm.evaluation.extraction import require_few_left_out, take_features
from mapet_mm.evaluation.features import Features
from mapet_mm.evaluation.image_sets import ImageSet, check_labels
from mapet_mm.evaluation.metrics.neighbours import suiting_k, too_few_voters
from mapet_mm.evaluation.metrics.rank_me import alignment, rank_me
from mapet_mm.evaluation.models import RANDOM, Model
from mapet_mm.evaluation.protocol import Evaluated
from mapet_mm.evaluation.protocols.knn import NearestNeighbours
from mapet_mm.evaluation.protocols.label_free import sampled_uniformity
from mapet_mm.evaluation.protocols.regression import LowShot, fitted_scaler
from mapet_mm.evaluation.tables import bootstrap, mean_of_groups
from mapet_mm.utils.tables import Column, Table

RESULT = "this pre-training"
START = "its start"
SHOTS = 10  # labels a class
FEW = 20  # images; of fewer, a bootstrapped interval is too narrow
Interval = tuple[float, float]


@dataclass(frozen=True)
class Gain:
    """A figure's difference between two models on the same images, with its 95 % interval."""

    points: float
    interval: Interval


@dataclass(frozen=True)
class Measure:
    """One line of the verdict."""

    name: str  # 'k-NN, top-1 (%)'
    values: Mapping[str, float]  # by model
    intervals: Mapping[str, Interval] = field(default_factory=dict)  # 95 %, over images
    gain: Gain | None = None  # of the result over the model that it is compared with


@dataclass(frozen=True)
class Verdict:
    """What a pre-training is worth, by measures of frozen features."""

    compared_with: str  # `START`, or `RANDOM` if there is no other start
    measures: Sequence[Measure]
    sentence: str
    num_images: int  # that are measured on

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
            cells = [_figure(measure.values.get(name), measure.intervals.get(name)) for name in models]
            if has_gains:
                cells.append(_gain(measure.gain))
            rows.append([measure.name, *cells])
        notes = []
        if has_gains:
            notes.append("[low, high]: 95 % interval over the held-out images; that of a gain is paired.")
            if self.num_images < FEW:
                notes.append(f"Of {self.num_images} images an interval is too narrow: do not rely on it.")
        return Table(columns, rows, notes)


def _figure(value: float | None, interval: Interval | None) -> str | None:
    """'81.2 [80.1, 82.4]'."""
    if value is None:
        return None
    text = f"{value:.1f}" if abs(value) >= 1 else f"{value:.3f}"
    return text if interval is None else f"{text} [{interval[0]:.1f}, {interval[1]:.1f}]"


def _gain(gain: Gain | None) -> str | None:
    """'+6.1 [+3.9, +8.2]'."""
    if gain is None:
        return None
    low, high = gain.interval
    return f"{gain.points:+.1f} [{low:+.1f}, {high:+.1f}]"


def judge(
    models: Mapping[str, tuple[Model, Mapping[str, ImageSet]]],
    cache: Path,
    token_accuracy: float | None = None,
) -> Verdict:
    """Compare a pre-training with its start or, without one, with random weights of the same network.

    With labels by k-NN (the last layer's class token and patch mean, k of `suiting_k`) and by ten labels a
    class; without labels, or with too few to vote, by RankMe, uniformity and alignment.

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
    evaluated = {}
    for name, (model, images) in models.items():
        features = {one: take_features(model, images[one], cache) for one in images}
        require_few_left_out(images.values())
        evaluated[name] = Evaluated(features, images, model.backbone.device)
    images = models[RESULT][1]
    reason = want_of_labels(images)
    if reason:
        measures = label_free_measures(evaluated)
        sentence = weak_sentence(measures, compared_with, reason)
    else:
        measures = labelled_measures(evaluated, compared_with)
        sentence = sentence_of(measures[0].gain, compared_with)
    if token_accuracy is not None:
        measures.append(Measure("held-out token accuracy (%)", {RESULT: token_accuracy}))
    return Verdict(compared_with, measures, sentence, len(images["val"]))


def want_of_labels(images: Mapping[str, ImageSet]) -> str:
    """Why nothing can be measured by labels; empty if there are enough to learn from and to be tested on."""
    if any(name not in images or images[name].labels is None for name in ("train", "val")):
        return "for want of labels"
    num_voters = len(images["train"].labels)
    num_classes = len(images["train"].labels.unique())
    if too_few_voters(num_voters, num_classes):
        return f"because {num_voters} images to vote are too few for {num_classes} classes"
    return ""


def labelled_measures(evaluated: Mapping[str, Evaluated], compared_with: str) -> list[Measure]:
    """k-NN and, where each class has images enough, ten labels a class."""
    hits_by_measure: dict[str, dict[str, np.ndarray]] = {}
    for name, one in evaluated.items():
        for measure, hits in hits_of(one).items():
            hits_by_measure.setdefault(measure, {})[name] = hits
    return [measure_of(name, hits, compared_with) for name, hits in hits_by_measure.items()]


def hits_of(evaluated: Evaluated) -> dict[str, Float[np.ndarray, " image"]]:
    """For each measure, 100 for a held-out image that is classified right, 0 for others, or their mean."""
    train = evaluated.features["train"]
    neighbours = NearestNeighbours(k=suiting_k(len(train)))
    check_labels(evaluated.images["train"], evaluated.images["val"])
    setting = train.settings[-1]
    votes = partial(neighbours.votes, evaluated, setting)
    hits = {"k-NN, top-1 (%)": neighbours.hits(evaluated, "val", [votes])[0].mean(0)}
    few = LowShot()
    scorers = few.scorers(evaluated, SHOTS, fitted_scaler(train))
    if scorers:
        # Where each class has no more than these, all draws would be the same images.
        drawn = ", one draw: there are no more" if len(scorers) == 1 else ""
        hits[f"{SHOTS} labels a class{drawn}, top-1 (%)"] = few.hits(evaluated, "val", scorers)[0].mean(0)
    return hits


def measure_of(name: str, hits: Mapping[str, Float[np.ndarray, " image"]], compared_with: str) -> Measure:
    """A figure of each model from its hits, and the gain."""
    one_group = np.zeros(len(hits[RESULT]), np.int64)
    intervals = {model: bootstrap(mean_of_groups, own, one_group) for model, own in hits.items()}
    values = {model: float(own.mean()) for model, own in hits.items()}
    return Measure(name, values, intervals, paired_gain(hits[RESULT], hits[compared_with], one_group))


def paired_gain(
    result: Float[np.ndarray, " image"],
    other: Float[np.ndarray, " image"],
    groups: Int64[np.ndarray, " image"],
) -> Gain:
    """The mean of the images' differences, with an interval by the bootstrap over images.

    Both models are resampled together: images that are easy or hard for both do not widen the interval.
    """
    difference = result - other
    return Gain(mean_of_groups(difference, groups), bootstrap(mean_of_groups, difference, groups))


def sentence_of(gain: Gain, compared_with: str) -> str:
    """The verdict in words."""
    low, high = gain.interval
    if low > 0:
        return (
            f"Pre-training gains {gain.points:.1f} points of k-NN ({low:.1f} to {high:.1f}) over "
            f"{compared_with}."
        )
    if high < 0:
        return (
            f"Worse: pre-training loses {-gain.points:.1f} points of k-NN ({-high:.1f} to {-low:.1f}) "
            f"against {compared_with}."
        )
    other = "the start's weights" if compared_with == START else compared_with
    return f"No gain seen over {other} (k-NN {gain.points:+.1f} points, {low:+.1f} to {high:+.1f})."


def label_free_measures(evaluated: Mapping[str, Evaluated]) -> list[Measure]:
    """RankMe, uniformity and, with a second view, alignment of the features that k-NN would compare."""
    figures: dict[str, dict[str, float]] = {}
    for name, one in evaluated.items():
        for measure, value in label_free_figures(one.features["val"], one.features.get("view")).items():
            figures.setdefault(measure, {})[name] = value
    return [Measure(name, values) for name, values in figures.items()]


def label_free_figures(val: Features, view: Features | None) -> dict[str, float]:
    """The measures without labels of one model."""
    setting = val.settings[-1]
    features = val.pooled(setting)
    figures = {"RankMe (effective rank)": rank_me([features])}
    if len(features) > 1:
        figures["uniformity (lower: more evenly spread)"] = sampled_uniformity(features)
    if view is not None:
        figures["alignment (lower: views agree more)"] = alignment(features, view.pooled(setting))
    return figures


def weak_sentence(measures: Sequence[Measure], compared_with: str, reason: str) -> str:
    """The words for measures without labels, and the reason for them."""
    rank = measures[0].values
    return (
        f"Weak evidence only, {reason}: RankMe is {rank[RESULT]:.1f}, and "
        f"{rank[compared_with]:.1f} of {compared_with}. "
        "A folder per class, or --labels FILE, with ten images of each class would say more."
    )
