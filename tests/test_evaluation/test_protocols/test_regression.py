"""Logistic regressions equal a second solver's, on all labels and on the same draws of few."""

import numpy as np
import pytest
import torch
from clustered_features import (
    MemoryFeatures,
    as_evaluated,
    evaluated_clusters,
    one_pooling,
    rare_class,
    tenth_of_each_class,
)
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.preprocessing import StandardScaler

from mapet_mm.evaluation.protocol import Evaluated
from mapet_mm.evaluation.protocols import regression
from mapet_mm.evaluation.protocols.regression import STRENGTHS, LowShot, Regression, draw, fitted_scaler
from mapet_mm.evaluation.verdict import hits_of


@pytest.fixture(scope="module")
def evaluated() -> Evaluated:
    return evaluated_clusters()


def test_equals_a_regression_on_the_same_draws_of_standardised_features():
    evaluated = evaluated_clusters()
    train, val = evaluated.features["train"], evaluated.features["val"]
    rows = LowShot(shots=[2, 0.1, 1000], draws=3).rows(evaluated)
    assert [row.setting for row in rows] == ["both, 2 a class", "both, 10% of the images"]  # none has 1000
    known, queries = train.pooled("both").double(), val.pooled("both").double()
    mean, deviation = known.mean(0), known.std(0, correction=0)
    for share, row in zip((2, 0.1), rows, strict=True):
        tops = []
        for seed in range(3):
            chosen = draw(train.labels.numpy(), share, seed)
            model = LogisticRegression(solver="newton-cg", max_iter=1000)
            model.fit((known[chosen] - mean) / deviation, train.labels[chosen])
            tops.append(100 * model.score((queries - mean) / deviation, val.labels))
        assert row.value == pytest.approx(np.mean(tops), abs=0.2)
        assert row.spread == pytest.approx(np.std(tops, ddof=1), abs=0.2)


def test_a_rare_class_counts_as_the_others():
    evaluated = rare_class()
    train, val = evaluated.features["train"], evaluated.features["val"]
    known, queries = train.pooled("mean").double(), val.pooled("mean").double()
    mean, deviation = known.mean(0), known.std(0, correction=0)
    model = LogisticRegression(solver="newton-cg", max_iter=1000, class_weight="balanced")
    model.fit((known - mean) / deviation, train.labels)
    expected = 100 * balanced_accuracy_score(val.labels, model.predict((queries - mean) / deviation))
    rows = {row.setting: row for row in Regression([1.0], layers=1).rows(evaluated)}
    row = rows["mean, last layer"]
    assert (row.value, row.unit) == (pytest.approx(expected, abs=0.2), "mean per class, %")


def test_a_draw_takes_as_many_of_each_class():
    labels = np.repeat([0, 1, 2], [10, 20, 300])
    assert np.bincount(labels[draw(labels, 5, seed=0)]).tolist() == [5, 5, 5]
    assert np.bincount(labels[draw(labels, 0.01, seed=0)]).tolist() == [1, 1, 3]  # one at least
    assert draw(labels, 11, seed=0) is None
    assert not np.array_equal(draw(labels, 5, seed=0), draw(labels, 5, seed=1))


def test_few_labels_are_those_of_whole_groups():
    labels = np.repeat([0, 0, 1, 1, 1, 1], 50)
    groups = np.arange(300) // 10  # ten of class 0, twenty of class 1
    drawn = draw(labels, 3, 0, groups)
    assert np.bincount(groups[drawn])[np.unique(groups[drawn])].tolist() == [10] * 6
    assert np.bincount(labels[drawn]).tolist() == [30, 30]
    assert np.bincount(labels[draw(labels, 0.2, 0, groups)]).tolist() == [20, 40]
    assert draw(labels, 11, 0, groups) is None
    evaluated = evaluated_clusters()
    evaluated.images["train"].groups = torch.arange(600) // 4
    rows = LowShot(shots=[2, 0.001, 1], draws=2).rows(evaluated)
    assert [row.setting for row in rows] == ["both, 2 groups a class", "both, 1 groups a class"]


def test_the_pooling_is_the_widest_that_the_backbone_has():
    evaluated = as_evaluated(*(one_pooling(bank, "mean") for bank in evaluated_clusters().features.values()))
    (row,) = LowShot(shots=[2], draws=1).rows(evaluated)
    assert (row.setting, row.spread) == ("mean, 2 a class", None)


def test_a_share_that_is_one_image_per_class_is_left_out_beside_it():
    evaluated = evaluated_clusters()
    found = {row.setting: row.value for row in LowShot(shots=[1, 0.001, 0.1], draws=2).rows(evaluated)}
    assert list(found) == ["both, 1 a class", "both, 10% of the images"]
    (row,) = LowShot(shots=[0.001], draws=2).rows(evaluated)
    assert row.value == found["both, 1 a class"]


def test_all_images_of_each_class_are_drawn_once():
    """Five draws would be the same images, and no mean of five."""
    whole = evaluated_clusters().features["train"]
    few = torch.cat([(whole.labels == label).nonzero()[:10, 0] for label in range(5)]).sort().values
    known = dict(layers=whole.layers, poolings=whole.poolings, grid=(3, 3), labels=whole.labels[few])
    train = MemoryFeatures(whole.values["pooled"][:, few], name="train", **known)
    evaluated = as_evaluated(train, evaluated_clusters().features["val"])
    few, all_there_are = LowShot(shots=[9, 10]).rows(evaluated)
    assert (len(LowShot().scorers(evaluated, 10, fitted_scaler(train))), all_there_are.spread) == (1, None)
    assert all_there_are.note == "one draw, of all images"
    assert few.spread > 0
    assert not few.note
    assert "10 labels a class, one draw: there are no more, top-1 (%)" in hits_of(evaluated)


@pytest.mark.parametrize("pooling", ["class token", "both"])
def test_a_solved_probe_equals_newtons_method(evaluated, pooling):
    """At the strength that it chose on every tenth image of each class, fitted to all of them.

    Of equal strengths it is the least, in whichever order they are given.
    """
    train, val = evaluated.features["train"], evaluated.features["val"]
    rows = {row.setting: row for row in Regression(strengths=STRENGTHS[::-1]).rows(evaluated)}
    scaler = StandardScaler().fit(known := train.pooled(pooling).double())
    known, queries = (scaler.transform(one) for one in (known, val.pooled(pooling).double()))
    own, top1 = tenth_of_each_class(train.labels).numpy(), {}
    for strength in STRENGTHS:
        model = LogisticRegression(C=strength, solver="newton-cholesky", tol=1e-10)
        model.fit(known[~own], train.labels[~own])
        top1[strength] = model.score(known[own], train.labels[own])
    best = max(top1, key=top1.get)
    model = LogisticRegression(C=best, solver="newton-cholesky", tol=1e-10).fit(known, train.labels)
    row = rows[f"{pooling}, last layer"]
    assert row.value == pytest.approx(100 * model.score(queries, val.labels), abs=0.3)
    assert row.note.startswith(f"C {best:.3g}")


def test_a_regression_converges_at_each_strength(evaluated):
    """Losses and predictions are Newton's; warm starts ended early at the largest."""
    train = evaluated.features["train"]
    rows = train.pooled("mean").numpy()
    labels = train.labels.numpy()
    assert len(STRENGTHS) == 8
    for strength in STRENGTHS:
        model = regression.regression(rows, labels, strength)
        newton = LogisticRegression(C=strength, solver="newton-cholesky", tol=1e-12, max_iter=1000)
        newton.fit(rows.astype(np.float64), labels)
        losses = []
        for one in (model, newton):
            chances = one.predict_log_proba(rows)[np.arange(len(rows)), labels]
            losses.append(-strength * chances.sum() + np.square(one.coef_).sum() / 2)
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        assert (model.predict(rows) == newton.predict(rows)).mean() > 0.999


def test_features_beyond_its_memory_are_refused_and_the_other_protocol_named(evaluated):
    """600 images of 2 x 16 numbers."""
    needed = 4 * 600 * 32 / 2**30
    sets = (evaluated.images, evaluated.features)
    assert Regression(memory=1.01 * needed).unfit(*sets) is None
    assert "LinearProbes" in Regression(memory=0.99 * needed).unfit(*sets)


def test_regressions_of_many_numbers_are_left_to_those_who_ask(evaluated, monkeypatch):
    """600 images of 2 x 16 numbers and 5 classes; ten labels a class are 50 images."""
    assert Regression().takes(evaluated.features) == {"layers": 1}
    monkeypatch.setattr(regression, "QUICK_SWEEP", 600 * 32 * 5 - 1)
    assert Regression().takes(evaluated.features) is None
    assert LowShot().takes(evaluated.features) == {"shots": (1, 2, 5, 10)}
    monkeypatch.setattr(regression, "QUICK", 50 * 32 * 5 - 1)
    assert LowShot().takes(evaluated.features) is None
