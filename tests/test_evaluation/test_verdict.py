"""The verdict: paired intervals cover what they promise, figures are scikit-learn's, and words follow."""

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from clustered_features import as_evaluated, evaluated_clusters, make_features, rare_class
from sklearn.neighbors import KNeighborsClassifier
from torch.nn import functional as F

from mapet_mm.evaluation import verdict
from mapet_mm.evaluation.images import ImageSetError
from mapet_mm.evaluation.metrics.neighbours import suiting_k
from mapet_mm.evaluation.models import RANDOM
from mapet_mm.evaluation.protocols.classification import Hits
from mapet_mm.evaluation.tables import bootstrap
from mapet_mm.evaluation.verdict import (
    RESULT,
    START,
    Gain,
    Measure,
    Verdict,
    hits_of,
    judge,
    labelled_measures,
    measure_of,
    paired_gain,
    sentence_of,
)


def test_paired_intervals_cover_the_true_gain_in_95_of_100_cases():
    """Two models that agree on most images, on 150 sets of 200 images; three deviations of a binomial."""
    random = np.random.default_rng(0)
    covered = 0
    widths = []
    for _ in range(150):
        easy = random.random(200)
        result = 100.0 * (easy < 0.75)
        other = np.where(random.random(200) < 0.1, 100.0 * (random.random(200) < 0.2), 100.0 * (easy < 0.70))
        gain = paired_gain(result, other)
        low, high = gain.interval
        covered += low <= 75 - (0.9 * 70 + 0.1 * 20) <= high
        widths.append(high - low)
        assert gain.points == pytest.approx(result.mean() - other.mean())
    assert 150 * 0.95 - 3 * (150 * 0.95 * 0.05) ** 0.5 < covered < 150
    # Of two sets of images drawn apart, the interval would be twice as wide.
    apart = 2 * 1.96 * 100 * (2 * 0.7 * 0.3 / 200) ** 0.5
    assert np.mean(widths) < 0.75 * apart


def test_a_gain_over_groups_has_the_interval_of_as_many_images():
    """Of 50 groups of four images that are all right or all wrong, that of 50 images."""
    random = np.random.default_rng(0)
    result = 100.0 * (random.random(50) < 0.8)
    other = 100.0 * (random.random(50) < 0.5)
    groups = np.arange(50).repeat(4)
    hits = {}
    for name, own in ((RESULT, result), (START, other)):
        hits[name] = Hits(own.repeat(4)[None], np.zeros(200, int), groups)
    found = measure_of("k-NN", hits, START)
    assert found.gain.points == pytest.approx(result.mean() - other.mean())
    assert found.gain.interval == pytest.approx(paired_gain(result, other).interval)
    assert found.intervals[START] == pytest.approx(bootstrap(np.mean, other))


class Images(SimpleNamespace):
    """As much of an image set as a verdict takes."""

    left_out: ClassVar = {}
    answers = None

    def __len__(self) -> int:
        return 400


@pytest.fixture
def models(monkeypatch) -> dict[str, tuple]:
    """A result whose features say more than its start's, and random ones; nothing is computed for them."""
    evaluated = evaluated_clusters()
    made = {RESULT: evaluated}
    for seed, name in ((5, START), (7, RANDOM)):
        noisy = []
        for part, bank in evaluated.features.items():
            worse = make_features(part, len(bank), seed)
            worse.values["pooled"] = 0.5 * bank.values["pooled"] + worse.values["pooled"] * (seed - 4)
            worse.labels = bank.labels
            noisy.append(worse)
        made[name] = as_evaluated(*noisy)
    banks = {(name, part): bank for name, one in made.items() for part, bank in one.features.items()}
    monkeypatch.setattr(verdict, "take_features", lambda model, images, _: banks[model.name, images.name])
    backbone = SimpleNamespace(device=torch.device("cpu"))
    for one in made.values():
        for part, images in one.images.items():
            one.images[part] = Images(**vars(images))
    return {name: (SimpleNamespace(name=name, backbone=backbone), one.images) for name, one in made.items()}


def test_classes_without_voters_are_refused_before_features_are_computed(models, monkeypatch, tmp_path):
    monkeypatch.setattr(verdict, "take_features", lambda *_: pytest.fail("hours of features"))
    models[RANDOM][1]["val"].labels = models[RANDOM][1]["val"].labels + 100
    with pytest.raises(ImageSetError, match="`train` has no image of class 1"):
        judge(models, tmp_path)


def test_figures_are_those_of_scikit_learn(models, tmp_path):
    """k = 20 by cosine, weighted as DINO does, of class token and patch mean, each normalised."""
    found = judge(models, tmp_path)
    evaluated = evaluated_clusters()
    train, val = evaluated.features["train"], evaluated.features["val"]

    def joined(bank) -> np.ndarray:
        halves = F.normalize(bank.pooled("both").unflatten(1, (2, -1)), dim=2).flatten(1)
        return F.normalize(halves, dim=1).numpy()

    neighbours = KNeighborsClassifier(20, weights=lambda squared: np.exp((1 - squared**2 / 2) / 0.07))
    right = neighbours.fit(joined(train), train.labels).predict(joined(val)) == val.labels.numpy()
    knn, few = found.measures
    assert knn.values[RESULT] == pytest.approx(100 * right.mean(), abs=0.1)
    assert list(knn.values) == [RESULT, START, RANDOM]
    assert few.name.startswith("10 labels a class")
    assert (found.compared_with, found.num_images) == (START, 400)
    assert knn.gain.points == pytest.approx(knn.values[RESULT] - knn.values[START])
    assert knn.gain.interval[0] > 0
    low, high = knn.gain.interval
    assert found.sentence == (
        f"Pre-training gains {knn.gain.points:.1f} points of k-NN ({low:.1f} to {high:.1f}) over its start."
    )
    assert found.table.columns[-1].heading == "gain over its start"


def test_without_a_start_the_gain_is_over_random_weights(models, tmp_path):
    del models[START]
    found = judge(models, tmp_path)
    assert found.compared_with == RANDOM
    assert found.sentence.endswith("over random weights.")


def test_too_few_images_to_vote_give_no_figure_by_labels(models, tmp_path):
    """11 of 9 classes, as a training of one epoch had them."""
    for _, images in models.values():
        images["train"].labels = torch.arange(11) % 9
    found = judge(models, tmp_path)
    assert not any("k-NN" in measure.name for measure in found.measures)
    assert "because 11 images to vote are too few for 9 classes" in found.sentence


@pytest.mark.parametrize(("num_voters", "k"), [(9, 1), (21, 2), (72, 7), (199, 19), (10_000, 20)])
def test_neighbours_are_at_most_a_tenth_of_the_voters(num_voters, k):
    assert suiting_k(num_voters) == k


def test_without_labels_the_evidence_is_said_to_be_weak(models, tmp_path):
    for _, images in models.values():
        del images["train"]
        images["val"].labels = None
    found = judge(models, tmp_path, token_accuracy=23.4)
    names = [measure.name.split(" (")[0] for measure in found.measures]
    assert names == ["RankMe", "uniformity", "held-out token accuracy"]
    assert found.measures[-1].values == {RESULT: 23.4}
    assert found.sentence.startswith("Weak evidence only")
    assert [column.heading for column in found.table.columns] == ["measure", RESULT, START, RANDOM]


@pytest.mark.parametrize(
    ("interval", "compared_with", "words"),
    [
        ((3.94, 8.2), START, "Pre-training gains 6.1 points of k-NN (3.9 to 8.2) over its start."),
        ((-0.1, 12.0), START, "No gain seen over the start's weights (k-NN +6.1 points, -0.1 to +12.0)."),
        ((-0.1, 12.0), RANDOM, "No gain seen over random weights"),
        ((-8.2, -3.9), START, "Worse: pre-training loses 6.1 points of k-NN (3.9 to 8.2) against its start."),
    ],
)
def test_the_words_follow_from_the_interval(interval, compared_with, words):
    points = -6.1 if interval[1] < 0 else 6.1
    assert sentence_of(Gain(points, interval), compared_with).startswith(words)


def test_few_images_are_said_to_carry_no_interval():
    measures = [Measure("k-NN, top-1 (%)", {RESULT: 60.0}, {RESULT: (40.0, 80.0)}, Gain(20.0, (1.0, 40.0)))]
    notes = {number: Verdict(RANDOM, measures, "", number).table.notes for number in (19, 20)}
    assert notes[20] == notes[19][:-1]
    assert notes[19][-1].startswith("Of 19 images an interval is too narrow")
    in_groups = Verdict(RANDOM, measures, "", 400, num_groups=16).table.notes
    assert in_groups[-1].startswith("Of 16 groups of images an interval is too narrow")
    of_class = {few: Verdict(RANDOM, measures, "", 400, smallest_class=few).table.notes for few in (4, 5)}
    assert of_class[5] == of_class[4][:-1]
    assert of_class[4][-1].startswith("Of 4 images of a class an interval is too narrow")


def test_near_twins_among_the_voters_are_said(models, tmp_path):
    """By the start's features; of features that are all alike nothing, and where groups are said."""
    assert "near-twin" not in judge(models, tmp_path).sentence
    start, images = models[START]
    of_train, of_val = (verdict.take_features(start, images[part], None) for part in ("train", "val"))
    of_val.values["pooled"][:, :50] = of_train.values["pooled"][:, :50]
    # Two tested images that are alike do not make all alike.
    of_val.values["pooled"][:, 299] = of_val.values["pooled"][:, 100]
    assert judge(models, tmp_path).sentence.endswith(
        " over its start. 12 % of the tested images have a near-twin among the voters (in the start's "
        "features under 1 % of the usual distance): name --groups."
    )
    images = models[RESULT][1]
    images["val"].groups = torch.arange(400) // 4
    found = judge(models, tmp_path)
    assert "near-twin" not in found.sentence
    assert found.num_groups == 100
    assert "over the held-out groups of images" in found.table.notes[0]
    images["val"].groups = None
    for bank in (of_train, of_val):
        bank.values["pooled"] += 1000
    assert "near-twin" not in judge(models, tmp_path).sentence


def test_images_that_weak_features_take_for_much_alike_are_no_near_twins(models, tmp_path):
    """Where two have a cosine of 0.95, many have one above 0.99 to some other."""
    start, images = models[START]
    generator = torch.Generator().manual_seed(0)
    for part in ("train", "val"):
        pooled = verdict.take_features(start, images[part], None).values["pooled"]
        few_directions = torch.randn(*pooled.shape[:2], 8, generator=generator)
        pooled[:] = 1
        pooled[..., :8] += 0.25 * few_directions.to(pooled.dtype)
    assert "near-twin" not in judge(models, tmp_path).sentence


def test_without_a_start_copies_of_files_are_said(models, tmp_path):
    del models[START]
    images = models[RESULT][1]
    for name in ("train", "val"):
        images[name].path = lambda index, name=name: str(tmp_path / name / str(index))
        for index in range(20):
            Path(images[name].path(index)).parent.mkdir(exist_ok=True)
            Path(images[name].path(index)).write_bytes(b"%d" % index)
    assert judge(models, tmp_path).sentence.endswith(
        ". 5 % of the tested images have a copy among the voters: name --groups."
    )


def test_too_few_groups_to_test_give_no_figure_by_labels(models, tmp_path):
    for _, images in models.values():
        images["val"].groups = torch.arange(400) % 4
        images["train"].labels = None  # so does `pretrain` then
    assert "because 4 groups to test are too few" in judge(models, tmp_path).sentence
    for _, images in models.values():
        images["val"].groups = torch.zeros(400, dtype=torch.int64)
    assert "because one group to test is too few" in judge(models, tmp_path).sentence


def test_a_gain_in_a_rare_class_is_seen():
    """One image in twenty is of it: both models are right about 19 of 20 images."""
    random = rare_class()
    for bank in random.features.values():
        bank.values["pooled"] = torch.randn(
            bank.values["pooled"].shape, generator=torch.Generator().manual_seed(3)
        )
    knn, few = labelled_measures({RESULT: rare_class(), RANDOM: random}, RANDOM)
    assert (knn.name, few.name) == ("k-NN, mean per class (%)", "10 labels a class, mean per class (%)")
    assert knn.values[RANDOM] == pytest.approx(50, abs=15)
    assert knn.gain.points == pytest.approx(knn.values[RESULT] - knn.values[RANDOM])
    assert knn.gain.interval[0] > 0


def test_few_tested_images_of_a_class_that_counts_as_much_as_others_are_said(models, tmp_path):
    for model, images in models.values():
        for part, number in (("train", 5), ("val", 3)):
            labels = images[part].labels
            labels = torch.where(torch.arange(len(labels)) < number, 0, labels.clamp(min=1))
            images[part].labels = verdict.take_features(model, images[part], None).labels = labels
    assert judge(models, tmp_path).smallest_class == 3


def test_a_model_gains_nothing_over_itself():
    evaluated = evaluated_clusters()
    for name, hits in hits_of(evaluated).items():
        measure = measure_of(name, {RESULT: hits, RANDOM: hits}, RANDOM)
        assert measure.gain == Gain(0.0, (0.0, 0.0))
        assert sentence_of(measure.gain, RANDOM).startswith("No gain seen")
