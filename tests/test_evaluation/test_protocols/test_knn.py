"""k-NN: votes by hand and by scikit-learn, in one part or many."""

import numpy as np
import pytest
import torch
from clustered_features import evaluated_clusters, rare_class
from sklearn.metrics import balanced_accuracy_score
from sklearn.neighbors import KNeighborsClassifier
from torch.nn import functional as F

from mapet_mm.evaluation.metrics import neighbours
from mapet_mm.evaluation.metrics.neighbours import knn_votes
from mapet_mm.evaluation.protocols.knn import NearestNeighbours


def predict(train, labels, queries, num_classes, part: int = 100, **options):
    known = zip(train.split(part), labels.split(part), strict=True)
    return knn_votes(queries, known, num_classes, **options).argmax(1).tolist()


def test_votes_by_hand():
    """Two weak neighbours of class 1 outvote a nearer one of class 0 only at a high temperature."""
    train = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.8, -0.6], [-1.0, 0.0]])
    labels, query = torch.tensor([0, 1, 1, 0]), torch.tensor([[2.0, 0.0]])
    assert predict(train, labels, query, 2, k=1, temperature=0.07) == [0]
    assert predict(train, labels, query, 2, k=3, temperature=0.07) == [0]  # e^14.3 > 2 e^11.4
    assert predict(train, labels, query, 2, k=3, temperature=1.0) == [1]  # e^1 < 2 e^0.8
    assert predict(train, labels, query, 2, k=9, temperature=1.0) == [1]  # all four vote


@pytest.mark.parametrize("temperature", [0.07, 0.01, 1e-6])
def test_votes_at_a_low_temperature_are_finite(temperature):
    """e^100 is beyond float32."""
    train = torch.tensor([[0.999, 0.0447], [1.0, 0.0]])
    arguments = train, torch.tensor([0, 1]), torch.tensor([[1.0, 0.0]]), 2
    assert predict(*arguments, k=2, temperature=temperature) == [1]


@pytest.mark.parametrize(("part", "rows"), [(200, 90), (64, 7), (5, 13)])
def test_equals_scikit_learns_classifier_with_the_same_weights(part, rows, monkeypatch):
    """Memory is bounded by parts and rows, results are the same."""
    monkeypatch.setattr(neighbours, "ROWS", rows)
    rng = np.random.default_rng(0)
    train, queries = (torch.from_numpy(rng.normal(size=(n, 8)).astype(np.float32)) for n in (200, 90))
    labels = torch.from_numpy(rng.integers(0, 5, 200))
    # On the unit sphere the squared distance is 2 - 2 cosine.
    reference = KNeighborsClassifier(7, weights=lambda distance: np.exp((1 - distance**2 / 2) / 0.07))
    expected = reference.fit(F.normalize(train), labels).predict(F.normalize(queries))
    assert predict(train, labels, queries, 5, part, k=7) == expected.tolist()


def test_memory_is_that_of_the_features_and_one_part(monkeypatch):
    """No copy of all training features is made: each part is normalised by itself."""
    largest = []
    normalise = F.normalize

    def counted(features, **options):
        largest.append(len(features))
        return normalise(features, **options)

    monkeypatch.setattr(F, "normalize", counted)
    predict(torch.randn(500, 4), torch.zeros(500, dtype=torch.int64), torch.randn(10, 4), 2, part=50)
    assert max(largest) == 50


def test_rows_equal_scikit_learns_of_each_pooling():
    evaluated = evaluated_clusters()
    train, val = evaluated.features["train"], evaluated.features["val"]
    rows = {row.setting: row.value for row in NearestNeighbours(k=10).rows(evaluated)}
    assert list(rows) == ["class token", "mean", "both"]
    for pooling, value in rows.items():
        known, queries = (one.pooled(pooling) for one in (train, val))
        if pooling == "both":  # class token and patch mean count alike
            known, queries = (
                torch.cat([F.normalize(half, dim=1) for half in one.chunk(2, 1)], 1)
                for one in (known, queries)
            )
        known, queries = (F.normalize(one, dim=1).numpy() for one in (known, queries))
        model = KNeighborsClassifier(10, weights=lambda distance: np.exp((1 - distance**2 / 2) / 0.07))
        assert 25 < value < 95
        assert value == pytest.approx(
            100 * model.fit(known, train.labels).score(queries, val.labels), abs=0.2
        )


def test_votes_for_a_rare_class_count_by_its_size():
    """As scikit-learn's shares of the votes, divided by the class's; undivided, class 0 has nearly all."""
    evaluated = rare_class()
    train, val = evaluated.features["train"], evaluated.features["val"]
    (row,) = [row for row in NearestNeighbours().rows(evaluated) if row.setting == "mean"]
    reference = KNeighborsClassifier(20, weights=lambda distance: np.exp((1 - distance**2 / 2) / 0.07))
    reference.fit(F.normalize(train.pooled("mean")), train.labels)
    queries = F.normalize(val.pooled("mean"))
    shares = reference.predict_proba(queries) / train.labels.bincount().numpy()
    expected = 100 * balanced_accuracy_score(val.labels, shares.argmax(1))
    assert (row.value, row.unit) == (pytest.approx(expected), "mean per class, %")
    evaluated = rare_class()  # whose config says that images count alike
    for images in evaluated.images.values():
        images.per_class = False
    (plain,) = [row for row in NearestNeighbours().rows(evaluated) if row.setting == "mean"]
    expected = 100 * reference.score(queries, val.labels)
    assert (plain.value, plain.unit) == (pytest.approx(expected), "top-1, %")
