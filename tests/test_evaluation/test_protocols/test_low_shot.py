"""Logistic regression on few labels equals a second solver on the same draws."""

import numpy as np
import pytest
import torch
from clustered_features import CLASSES, DIM, as_evaluated, evaluated_clusters, one_pooling
from torch.nn import functional as F

from mapet_mm.evaluation.protocols.low_shot import LowShot, draw


def test_equals_a_regression_solved_by_torch():
    """The same images of each draw, the same objective, another solver."""
    evaluated = evaluated_clusters()
    train, val = evaluated.features["train"], evaluated.features["val"]
    rows = LowShot(shots=[2, 0.1, 1000], draws=3).run(evaluated)
    assert [row.setting for row in rows] == ["both, 2 a class", "both, 10% of the images"]  # none has 1000
    known, queries = train.pooled("both").double(), val.pooled("both").double()
    mean, deviation = known.mean(0), known.std(0, correction=0)
    known, queries = (known - mean) / deviation, (queries - mean) / deviation
    for share, row in zip((2, 0.1), rows, strict=True):
        tops = []
        for seed in range(3):
            chosen = torch.from_numpy(draw(train.labels.numpy(), share, seed))
            weight = torch.zeros(CLASSES, 2 * DIM + 1, dtype=torch.double, requires_grad=True)
            solver = torch.optim.LBFGS([weight], max_iter=500, line_search_fn="strong_wolfe")

            def loss(weight=weight, chosen=chosen, solver=solver):
                solver.zero_grad()
                logits = known[chosen] @ weight[:, :-1].T + weight[:, -1]
                value = F.cross_entropy(logits, train.labels[chosen], reduction="sum")
                value = value + weight[:, :-1].square().sum() / 2
                value.backward()
                return value

            solver.step(loss)
            predicted = (queries @ weight[:, :-1].T + weight[:, -1]).argmax(1)
            tops.append(100 * (predicted == val.labels).double().mean().item())
        assert row.value == pytest.approx(np.mean(tops), abs=0.2)
        assert row.spread == pytest.approx(np.std(tops, ddof=1), abs=0.2)


def test_a_draw_takes_as_many_of_each_class():
    labels = np.repeat([0, 1, 2], [10, 20, 300])
    assert np.bincount(labels[draw(labels, 5, seed=0)]).tolist() == [5, 5, 5]
    assert np.bincount(labels[draw(labels, 0.01, seed=0)]).tolist() == [1, 1, 3]  # one at least
    assert draw(labels, 11, seed=0) is None
    assert not np.array_equal(draw(labels, 5, seed=0), draw(labels, 5, seed=1))


def test_the_pooling_is_the_widest_that_the_backbone_has():
    evaluated = as_evaluated(*(one_pooling(bank, "mean") for bank in evaluated_clusters().features.values()))
    (row,) = LowShot(shots=[2], draws=1).run(evaluated)
    assert (row.setting, row.spread) == ("mean, 2 a class", None)


@pytest.mark.parametrize("share", [0, 1.5])
def test_impossible_numbers_of_images_are_refused(share):
    with pytest.raises(ValueError, match="shots"):
        LowShot(shots=[share])
