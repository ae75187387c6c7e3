"""The table of a fine-tuning: figures by value, intervals recomputed by other means."""

import numpy as np
import pytest
from mmengine.registry import METRICS, DefaultScope
from mmpretrain.structures import DataSample
from sklearn.metrics import balanced_accuracy_score

from mapet_mm.evaluation.models import RANDOM
from mapet_mm.evaluation.task import judge_task
from mapet_mm.evaluation.verdict import RESULT, START


def answers(rng: np.random.Generator, share: float, count: int) -> np.ndarray:
    """Right or wrong of each image, and 1."""
    right = (rng.random(count) < share).astype(float)
    return np.stack([right, np.ones(count)], axis=1)[..., None]


def areas(rng: np.random.Generator, share: float, count: int, classes: int = 4) -> np.ndarray:
    """Intersections and unions of each image; some lack a class."""
    unions = rng.integers(0, 50, (count, classes)) * (rng.random((count, classes)) < 0.7)
    return np.stack([np.floor(share * unions), unions], axis=1).astype(float)


def recomputed(figure, num_units: int) -> tuple[float, float]:
    """The middle 95 % of a figure of drawn units, one draw after the other."""
    rng = np.random.default_rng(123)
    found = [figure(rng.integers(0, num_units, num_units)) for _ in range(20_000)]
    return tuple(np.percentile(found, [2.5, 97.5]))


def mean_iou(sums: np.ndarray) -> float:
    ratios = [inter / union for inter, union in sums.sum(0).T if union]
    return 100 * sum(ratios) / len(ratios)


def test_accuracies_and_their_intervals_over_images():
    rng = np.random.default_rng(0)
    sums = {RESULT: answers(rng, 0.8, 1000), START: answers(rng, 0.7, 1000), RANDOM: answers(rng, 0.3, 1000)}
    (line,) = judge_task("top-1 (%)", sums).measures
    for name, own in sums.items():
        assert line.values[name] == pytest.approx(100 * own[:, 0].mean())
        expected = recomputed(lambda drawn, own=own: 100 * own[drawn, 0].mean(), 1000)
        assert line.intervals[name] == pytest.approx(expected, abs=0.1)
    difference = (sums[RESULT] - sums[START])[:, 0, 0]
    assert line.gain.points == pytest.approx(100 * difference.mean())
    assert line.gain.interval == pytest.approx(
        recomputed(lambda drawn: 100 * difference[drawn].mean(), 1000), abs=0.1
    )


def test_an_accuracy_per_class_is_scikit_learns():
    rng = np.random.default_rng(0)
    classes = (np.arange(400) % 20 == 0).astype(int)
    never = (1.0 - classes)[:, None, None]  # the answer is always class 0
    sums = {RESULT: answers(rng, 0.8, 400), START: np.concatenate([never, np.ones_like(never)], axis=1)}
    verdict = judge_task("mean accuracy per class (%)", sums, classes=classes)
    (line,) = verdict.measures
    right = sums[RESULT][:, 0, 0].astype(bool)
    expected = 100 * balanced_accuracy_score(classes, np.where(right, classes, 1 - classes))
    assert line.values == {RESULT: pytest.approx(expected), START: 50.0}
    gain = f"Pre-training gains {expected - 50:.1f} points of mean accuracy per class"
    assert verdict.sentence.startswith(gain)


def test_mean_ious_and_their_intervals_over_whole_groups():
    """Groups of unlike sizes; a class that no drawn group has does not count."""
    rng = np.random.default_rng(1)
    groups = np.sort(rng.integers(0, 40, 300))
    noise = rng.normal(0, 0.02, 40)[groups][:, None]
    own = areas(rng, 0.6, 300)
    own[:, 0] *= 1 + noise
    other = own.copy()
    other[:, 0] *= 0.97
    verdict = judge_task("mIoU (%)", {RESULT: own, RANDOM: other}, [f"clip {group}" for group in groups])
    (line,) = verdict.measures
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]

    def of(sums, drawn):
        return mean_iou(sums[np.concatenate([members[index] for index in drawn])])

    assert line.values[RESULT] == pytest.approx(mean_iou(own))
    expected = recomputed(lambda drawn: of(own, drawn), len(members))
    assert line.intervals[RESULT] == pytest.approx(expected, abs=0.1)
    expected = recomputed(lambda drawn: of(own, drawn) - of(other, drawn), len(members))
    assert line.gain.interval == pytest.approx(expected, abs=0.1)
    assert "points of mIoU" in verdict.sentence
    assert "over random weights" in verdict.sentence


def test_a_few_groups_are_not_drawn_and_it_is_said():
    rng = np.random.default_rng(0)
    sums = {RESULT: answers(rng, 0.8, 50), START: answers(rng, 0.2, 50)}
    verdict = judge_task("top-1 (%)", sums, ["a"] * 30 + ["b"] * 20)
    low, high = verdict.measures[0].intervals[RESULT]
    assert high - low > 5
    assert "are of 2 groups, too few to draw" in verdict.sentence


def test_one_training_has_a_figure_and_no_gain():
    verdict = judge_task("top-1 (%)", {RESULT: answers(np.random.default_rng(0), 1.0, 10)})
    assert verdict.sentence == "Trained from this pre-training: top-1 100.0 %."
    assert verdict.measures[0].gain is None
    assert len(verdict.table.rows) == 1


def test_a_metric_keeps_what_each_image_adds(tmp_path):
    file = tmp_path / "sums.npy"
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        metric = METRICS.build(dict(type="mapet_mm.ByImage", metric="Accuracy", topk=(1,), file=str(file)))
    samples = []
    for label, scores in ((1, [0.1, 0.9]), (0, [0.2, 0.8]), (0, [0.7, 0.3])):
        samples.append(DataSample().set_gt_label(label).set_pred_score(np.array(scores)).to_dict())
    metric.process({}, samples[:2])
    metric.process({}, samples[2:])
    assert metric.evaluate(3) == {"accuracy/top1": pytest.approx(200 / 3)}
    assert np.load(file)[:, :, 0].tolist() == [[1, 1], [0, 1], [1, 1]]
