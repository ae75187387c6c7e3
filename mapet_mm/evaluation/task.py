"""What a pre-training is worth for a task: the same training from it, from its start, from random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int64, Shaped

from mapet_mm.evaluation.models import RANDOM
from mapet_mm.evaluation.protocols.classification import Hits
from mapet_mm.evaluation.tables import TAILS
from mapet_mm.evaluation.verdict import (
    FEWEST_GROUPS,
    RESULT,
    START,
    Gain,
    Interval,
    Measure,
    Verdict,
    measure_of,
    sentence_of,
)

DRAWS = 10_000  # of a bootstrap: its ends are then certain to a thirtieth of their distance
AT_ONCE = 500


def judge_task(
    measure: str,
    sums: Mapping[str, Float[np.ndarray, "image 2 class"]],
    groups: Sequence[str] | None = None,
    classes: Int64[np.ndarray, " image"] | None = None,
) -> Verdict:
    """Compare trainings on the same labels by the images that none was trained on.

    Args:
        measure: 'top-1 (%)', 'mean accuracy per class (%)' or 'mIoU (%)'.
        sums: by what a training started from, `RESULT` and perhaps others: what each image adds to the
                figure, numerators and denominators by class; see `mapet_mm.evaluation.metrics.ByImage`.
        groups: of the images, whole ones of which are drawn for intervals.
        classes: of the images, numbered, if an accuracy is to be the mean over them.
    """
    drawn_by = None
    num_groups = None
    if groups is not None:
        names, numbers = np.unique(groups, return_inverse=True)
        num_groups = len(names)
        if num_groups >= FEWEST_GROUPS:
            drawn_by = numbers
    compared_with = START if START in sums else RANDOM
    if classes is None:
        line = measure_of_sums(measure, sums, compared_with, drawn_by)
    else:
        hits = {name: Hits(100 * own[None, :, 0, 0], classes, drawn_by) for name, own in sums.items()}
        line = measure_of(measure, hits, compared_with)
    name = measure.removesuffix(" (%)")
    if line.gain is None:
        sentence = f"Trained from this pre-training: {name} {line.values[RESULT]:.1f} %."
    else:
        sentence = sentence_of(line.gain, compared_with, name)
    if num_groups is not None and num_groups < FEWEST_GROUPS:
        of_few = "one group" if num_groups == 1 else f"{num_groups} groups"
        sentence += (
            f" The held-out images are of {of_few}, too few to draw: intervals are over images, and say "
            "nothing of other groups."
        )
        num_groups = None
    return Verdict(compared_with, [line], sentence, len(sums[RESULT]), num_groups)


def measure_of_sums(
    name: str,
    sums: Mapping[str, Float[np.ndarray, "image 2 class"]],
    compared_with: str,
    groups: Int64[np.ndarray, " image"] | None,
) -> Measure:
    """The figure of each training, and the gain, if there is another one to compare with."""
    drawn_by = np.arange(len(sums[RESULT])) if groups is None else groups
    drawn = {start: drawn_figures(own, drawn_by) for start, own in sums.items()}
    values = {start: figure(own.sum(0)) for start, own in sums.items()}
    intervals = {start: _middle(figures) for start, figures in drawn.items()}
    gain = None
    if compared_with in sums:
        points = values[RESULT] - values[compared_with]
        gain = Gain(points, _middle(drawn[RESULT] - drawn[compared_with]))
    return Measure(name, values, intervals, gain)


def figure(sums: Shaped[np.ndarray, "*draw 2 class"]) -> Shaped[np.ndarray, "*draw"]:
    """The mean over the classes that occur of numerator by denominator, in percent."""
    with np.errstate(invalid="ignore"):
        ratios = 100 * sums[..., 0, :] / sums[..., 1, :]
    return np.nanmean(ratios, axis=-1)


def drawn_figures(
    sums: Float[np.ndarray, "image 2 class"], groups: Int64[np.ndarray, " image"]
) -> Float[np.ndarray, " draw"]:
    """The figure of each of many draws of as many groups, with replacement: the same draws for all models."""
    num_groups = int(groups.max()) + 1
    by_group = np.zeros((num_groups, *sums.shape[1:]))
    np.add.at(by_group, groups, sums)
    generator = np.random.default_rng(0)
    found = []
    for _ in range(DRAWS // AT_ONCE):
        times = generator.multinomial(num_groups, np.full(num_groups, 1 / num_groups), size=AT_ONCE)
        found.append(figure(np.tensordot(times, by_group, axes=1)))  # draw 2 class
    return np.concatenate(found)


def _middle(figures: Float[np.ndarray, " draw"]) -> Interval:
    low, high = np.nanquantile(figures, TAILS)
    return float(low), float(high)
