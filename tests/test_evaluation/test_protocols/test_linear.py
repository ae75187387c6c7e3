"""Each protocol's figure is that of a second implementation on the same features."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from clustered_features import CLASSES, DIM, LAYERS, Labelled, evaluated_clusters, make_features
from mapet_mm.evaluation.batches import ShuffledBatches
from mmpretrain.structures import DataSample
from sklearn.neighbors import KNeighborsClassifier
from torch import nn
from torch.nn import functional as F

from mapet_mm.evaluation import features as feature_module
from mapet_mm.evaluation.features import MemoryFeatures
from mapet_mm.evaluation.protocol import Evaluated
from mapet_mm.evaluation.protocols.attentive import AttentiveClassifier, AttentiveProbe, train_attentive
from mapet_mm.evaluation.protocols.knn import NearestNeighbours
from mapet_mm.evaluation.protocols.linear import (
    BEiTLinearProbes,
    LinearProbes,
    Probe,
    accuracies,
    parts,
    train_probes,
)
from mapet_mm.evaluation.protocols.low_shot import LowShot, draw
from mapet_mm.models.heads.linear_probe import LayerwiseLinearHead


@pytest.fixture(scope="module")
def evaluated() -> Evaluated:
    return evaluated_clusters()


def test_nearest_neighbours_equal_scikit_learns(evaluated):
    train, val = evaluated.features["train"], evaluated.features["val"]
    rows = {row.setting: row.value for row in NearestNeighbours(k=10).run(evaluated)}
    assert list(rows) == ["class token", "mean", "both"]
    for pooling, value in rows.items():
        known, queries = (F.normalize(one.pooled(pooling), dim=1).numpy() for one in (train, val))
        model = KNeighborsClassifier(10, weights=lambda distance: np.exp((1 - distance**2 / 2) / 0.07))
        expected = 100 * model.fit(known, train.labels).score(queries, val.labels)
        assert 25 < value < 95
        assert abs(value - expected) < 0.2


def test_nearest_neighbours_far_from_the_origin_are_those_of_float64():
    """Features that float16 still tells apart; each training image is a class, so top-1 counts neighbours."""
    generator = torch.Generator().manual_seed(0)
    train, val = (torch.randn(1, 1, 300, DIM, generator=generator) + 100 for _ in "tv")
    known, queries = (F.normalize(one[0, 0].half().double(), dim=1) for one in (train, val))
    labels = {"train": torch.arange(300), "val": (queries @ known.T).argmax(1)}
    features = {
        name: MemoryFeatures(
            one.half(), name=name, layers=["output"], poolings=["mean"], grid=(0, 0), labels=labels[name]
        )
        for name, one in (("train", train), ("val", val))
    }
    images = {name: Labelled(name, one) for name, one in labels.items()}
    (row,) = NearestNeighbours(k=1).run(Evaluated(None, features, images, torch.device("cpu")))
    assert row.value == 100


@pytest.mark.parametrize("scale", [1e-13, 1e-18, 1e18])
def test_the_size_of_features_changes_no_neighbour_and_no_regression(evaluated, scale):
    """Random weights of MMPretrain's EfficientNet give 1e-13; below 1e-12 lengths had not become 1."""
    features = {
        name: MemoryFeatures(
            one.read("pooled", 0)[1:, -1:],
            name=name,
            layers=["output"],
            poolings=["mean"],
            grid=(0, 0),
            labels=one.labels[:256],
        )
        for name, one in evaluated.features.items()
    }
    scaled = {
        name: MemoryFeatures(
            one.read("pooled", 0) * scale,
            name=name,
            layers=["output"],
            poolings=["mean"],
            grid=(0, 0),
            labels=one.labels,
        )
        for name, one in features.items()
    }
    usual, others = (replace(evaluated, features=one) for one in (features, scaled))
    for protocol in (NearestNeighbours(k=5), LowShot(shots=[5], draws=2)):
        found, expected = (protocol.run(one)[0].value for one in (others, usual))
        assert expected > 25
        assert found == pytest.approx(expected, abs=0.5)


def test_low_shot_equals_a_regression_solved_by_torch(evaluated):
    """The same images of each draw, the same objective, another solver."""
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
        assert abs(row.value - np.mean(tops)) < 0.2
        assert row.spread == pytest.approx(np.std(tops, ddof=1), abs=0.2)


def test_a_draw_takes_as_many_of_each_class():
    labels = np.repeat([0, 1, 2], [10, 20, 300])
    assert np.bincount(labels[draw(labels, 5, seed=0)]).tolist() == [5, 5, 5]
    assert np.bincount(labels[draw(labels, 0.01, seed=0)]).tolist() == [1, 1, 3]  # one at least
    assert draw(labels, 11, seed=0) is None
    assert not np.array_equal(draw(labels, 5, seed=0), draw(labels, 5, seed=1))


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_probe_learns_what_it_learns_alone(evaluated, optimizer):
    """Of 18 trained together, each equals a plain linear layer trained by torch's optimizer at its rate."""
    train, val = evaluated.features["train"], evaluated.features["val"]
    rates = (0.01, 0.1, 1.0) if optimizer == "SGD" else (1e-3, 1e-2)
    batches = ShuffledBatches(train, "pooled", 128)
    probes = [
        Probe(layer, pooling, r) for layer in range(LAYERS) for pooling in train.poolings for r in rates
    ]
    found = accuracies(train_probes(batches, probes, CLASSES, 3, optimizer, 0.01), val)
    assert list(found) == sorted(probes)
    for layer, pooling, rate in ((0, "both", rates[0]), (2, "mean", rates[1]), (1, "class token", rates[-1])):
        width = DIM * (2 if pooling == "both" else 1)
        alone = nn.Linear(width, CLASSES)
        with torch.no_grad():
            alone.weight.copy_(torch.randn(CLASSES, width, generator=torch.Generator().manual_seed(0)) * 0.01)
            alone.bias.zero_()
        lr = rate * 128 / 256
        kind = dict(momentum=0.9) if optimizer == "SGD" else dict(weight_decay=0.01)
        steps, step = getattr(torch.optim, optimizer)(alone.parameters(), lr=lr, **kind), 0
        for epoch in range(3):
            for values, labels in ShuffledBatches(train, "pooled", 128).epoch(epoch):
                steps.param_groups[0]["lr"] = (
                    lr * (1 + math.cos(math.pi * step / 15)) / 2
                )  # 5 batches an epoch
                steps.zero_grad()
                F.cross_entropy(alone(train.pool(values[:, layer], pooling)), labels).backward()
                steps.step()
                step += 1
        top1 = 100 * (alone(val.pooled(pooling, layer)).argmax(1) == val.labels).float().mean().item()
        assert abs(top1 - found[Probe(layer, pooling, rate)]) < 0.2
        assert 30 < top1 < 99


def test_probes_do_not_depend_on_memory(evaluated, monkeypatch):
    """In one part or in many, which keep to the limit, the same classifiers."""
    protocol = LinearProbes(rates=[0.03, 0.3], epochs=1, least_steps=1)
    rows = protocol.run(evaluated)
    limit = 16 * CLASSES * (2 * DIM + 1)
    monkeypatch.setattr("mapet_mm.evaluation.protocols.linear.MEMORY_BYTES", limit)
    probes = [Probe(layer, pooling, 0.1) for layer in range(LAYERS) for pooling in ("class token", "both")]
    divided = list(parts(probes, DIM, CLASSES))
    assert [probe for part in divided for probe in part] == sorted(probes)
    assert [len(part) for part in divided] == [1] * 6
    assert protocol.run(evaluated) == rows


def test_beits_probe_starts_and_steps_like_the_head_of_the_recipes(evaluated):
    """`LayerwiseLinearHead`, which the recipes train on images, has the same logits and gradient."""
    train = evaluated.features["train"]
    values, labels = next(ShuffledBatches(train, "pooled", 64).epoch(0))
    head = LayerwiseLinearHead(CLASSES, DIM, layers=LAYERS)
    (bank,) = train_probes(ShuffledBatches(train, "pooled", 64), [Probe(1, "both", 0.1)], CLASSES, 1)
    with torch.no_grad():
        for classifier in head.classifiers:
            classifier.weight.copy_(bank.weight[0])
            classifier.bias.copy_(bank.bias[0])
    tokens = values[:, 1].transpose(0, 1)  # B 2 D: class token and one patch, which is its mean
    logits = head.layer_logits([tokens] * LAYERS)[1]
    torch.testing.assert_close(logits, bank(train.pool(values[:, 1], "both"))[0])
    head.loss([tokens] * LAYERS, [DataSample().set_gt_label(label) for label in labels.tolist()])[
        "loss"
    ].backward()
    F.cross_entropy(bank(train.pool(values[:, 1], "both"))[0], labels).backward()
    torch.testing.assert_close(head.classifiers[1].weight.grad, bank.weight.grad[0])


def test_rows_of_linear_probes_name_what_was_best(evaluated):
    rows = LinearProbes(rates=[0.01, 0.1], epochs=2, least_steps=2).run(evaluated)
    shown = [row for row in rows if not row.detail]
    assert [row.setting for row in shown] == [
        f"{pooling}, {which} layer"
        for pooling in ("class token", "mean", "both")
        for which in ("last", "best")
    ]
    details = {row.setting: row.value for row in rows if row.detail}
    assert len(details) == 9
    for row in shown[1::2]:
        pooling, place = row.setting.removesuffix(", best layer"), row.note.split(", ")[0]
        assert row.value == details[f"{pooling}, {place}"]
        assert row.value == max(value for setting, value in details.items() if setting.startswith(pooling))
    beit = [row.setting for row in BEiTLinearProbes(least_steps=2, epochs=1).run(evaluated) if row.detail]
    assert beit == ["both, layer 1", "both, layer 2"]  # "output" has a norm


def test_a_best_rate_at_the_end_of_the_sweep_says_so(evaluated):
    """The features may be too small or too large for all rates: the figure is no measure of them then."""
    options = dict(epochs=2, least_steps=2, poolings=["mean"])
    for rates, expected in (
        ([1e-3, 0.1, 1e4], "rate 0.1"),
        ([1e-6, 1e-4], "rate 0.0001, the highest of the sweep"),
        ([0.1, 1e4], "rate 0.1, the lowest of the sweep"),
        ([0.1], "rate 0.1"),
    ):
        assert LinearProbes(rates=rates, **options).run(evaluated)[0].note == expected
    constant = {
        name: MemoryFeatures(
            torch.zeros(1, 1, len(one), DIM),
            name=name,
            layers=["output"],
            poolings=["mean"],
            grid=(0, 0),
            labels=one.labels,
        )
        for name, one in evaluated.features.items()
    }
    (row, *_) = LinearProbes(rates=[1e-4, 2e-4], **options).run(replace(evaluated, features=constant))
    assert row.note == "rate 0.0001, all rates alike"


class NaiveAttention(nn.Module):
    """Keys and values of every token, one head at a time."""

    def __init__(self, other: AttentiveClassifier):
        super().__init__()
        self.heads = other.heads
        for name, value in other.named_parameters():
            setattr(self, name, nn.Parameter(value.detach().clone()))

    def forward(self, tokens):
        keys, values = tokens @ self.key.T, tokens @ self.value.T + self.value_bias  # B N D
        parts = []
        for q, k, v in zip(*(x.chunk(self.heads, -1) for x in (self.query, keys, values)), strict=True):
            weights = (k @ q / math.sqrt(len(q))).softmax(1)  # B N
            parts.append((weights[..., None] * v).sum(1))
        return torch.cat(parts, 1) @ self.classifier.T + self.bias


def test_attentive_probe_equals_a_naive_loop(evaluated, monkeypatch):
    """Trained on the same batches, the loop classifies as many images right."""
    monkeypatch.setattr("mapet_mm.evaluation.protocols.attentive.HEAD_WIDTH", 4)
    train, val = evaluated.features["train"], evaluated.features["val"]
    rates = [1e-3, 2e-2]
    models = train_attentive(ShuffledBatches(train, "tokens", 100), rates, CLASSES, 4)
    assert models[0].heads == 4
    assert AttentiveClassifier(18, CLASSES).heads == 3  # which divide the width
    naive = NaiveAttention(AttentiveClassifier(DIM, CLASSES))
    steps, step = torch.optim.AdamW(naive.parameters(), lr=2e-2, weight_decay=5e-4), 0
    for epoch in range(4):
        for tokens, labels in ShuffledBatches(train, "tokens", 100).epoch(epoch):
            cosine = (1 + math.cos(math.pi * step / 24)) / 2  # 6 batches an epoch
            steps.param_groups[0]["lr"] = 2e-2 * min((step + 1) / 2, cosine)
            steps.zero_grad()
            F.cross_entropy(naive(tokens), labels).backward()
            steps.step()
            step += 1
    tokens = torch.cat([tokens for _, tokens in val.blocks("tokens")])
    with torch.no_grad():
        expected, found = naive(tokens), models[1](tokens)
    top1 = [100 * (one.argmax(1) == val.labels).float().mean().item() for one in (expected, found)]
    assert abs(top1[0] - top1[1]) < 0.2
    assert top1[0] > 50


def test_attentive_probe_needs_patches(evaluated):
    vectors = {name: make_features(name, 60, 0) for name in ("train", "val")}
    for one in vectors.values():
        one.grid = (0, 0)
    assert AttentiveProbe().run(Evaluated(None, vectors, evaluated.images, torch.device("cpu"))) == []
    (row,) = AttentiveProbe(rates=[1e-2], least_steps=30).run(evaluated)
    assert row.value > 30


def test_batches_cover_each_image_once_whatever_fits_in_memory(monkeypatch):
    monkeypatch.setattr(feature_module, "BLOCK", 16)
    size = 100
    numbers = torch.arange(size, dtype=torch.float)
    known = dict(layers=["output"], poolings=["mean"], grid=(1, 1), labels=torch.arange(size) % 7)
    features = MemoryFeatures(numbers.view(1, 1, size, 1), numbers.view(size, 1, 1), name="train", **known)
    orders = []
    for window in (2**29, 3 * 16 * 4):  # all, or three blocks of 16 float32
        monkeypatch.setattr("mapet_mm.evaluation.batches.WINDOW_BYTES", window)
        for kind in ("pooled", "tokens"):
            batches = ShuffledBatches(features, kind, 10, seed=3)
            order = [(v.flatten().tolist(), y.tolist()) for v, y in batches.epoch(1)]
            seen = [value for values, _ in order for value in values]
            assert sorted(seen) == numbers.tolist()
            assert seen != sorted(seen)
            assert all(
                int(v) % 7 == y for values, labels in order for v, y in zip(values, labels, strict=True)
            )
            assert order == [(v.flatten().tolist(), y.tolist()) for v, y in batches.epoch(1)]
            assert order != [(v.flatten().tolist(), y.tolist()) for v, y in batches.epoch(2)]
            orders.append(order)
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_batches_keep_what_one_block_has_in_float32():
    """The first block is in float16, which does not hold what is in the second."""

    class Mixed(MemoryFeatures):
        def read(self, kind, block, layer=None):
            return super().read(kind, block, layer).to((torch.float16, torch.float32)[block])

    size = feature_module.BLOCK + 3
    values = torch.arange(size).float() * 1000
    labels = torch.arange(size)
    known = dict(name="train", layers=["output"], poolings=["mean"], grid=(0, 0), labels=labels)
    batches = ShuffledBatches(Mixed(values.view(1, 1, -1, 1), **known), "pooled", 50)
    for epoch in range(4):
        for found, places in batches.epoch(epoch):
            last = places >= feature_module.BLOCK
            assert torch.equal(found[0, 0, last, 0], values[places[last]])


def without_class_token(evaluated: Evaluated) -> Evaluated:
    """The same images seen by a backbone that has patches alone."""
    features = {}
    for name, one in evaluated.features.items():
        pooled = torch.stack([one.pooled("mean", layer) for layer in range(LAYERS)])[None]
        known = dict(layers=one.layers, poolings=["mean"], grid=one.grid, labels=one.labels)
        features[name] = MemoryFeatures(pooled, name=name, **known)
    return Evaluated(None, features, evaluated.images, evaluated.device)


@pytest.mark.parametrize(
    ("protocol", "word"),
    [
        (BEiTLinearProbes(), "no linear, BEiT's on both: the backbone gives mean only"),
        (LinearProbes(poolings=["class token"]), "no linear on class token: the backbone gives mean only"),
        (LowShot(pooling="both"), "no logistic regression on both: the backbone gives mean only"),
    ],
)
def test_a_pooling_that_a_backbone_does_not_have_gives_no_rows_and_a_word(evaluated, capsys, protocol, word):
    known = without_class_token(evaluated)
    assert protocol.run(known) == protocol.sections(known, []) == []
    assert capsys.readouterr().out == word + "\n"


def test_without_a_class_token_few_labels_are_learnt_on_the_patch_mean(evaluated):
    (row,) = LowShot(shots=[2], draws=1).run(without_class_token(evaluated))
    assert row.setting == "mean, 2 a class"


def test_a_low_temperature_lets_the_nearest_neighbour_decide(evaluated):
    """Where exp(1 / temperature) is beyond float32: as k = 1, and as votes in float64."""
    values = [row.value for row in NearestNeighbours(k=20, temperature=1e-6).run(evaluated)]
    assert values == [row.value for row in NearestNeighbours(k=1).run(evaluated)]
    train, val = evaluated.features["train"], evaluated.features["val"]
    known, queries = (F.normalize(one.pooled("mean"), dim=1).numpy() for one in (train, val))
    model = KNeighborsClassifier(20, weights=lambda distance: np.exp((-(distance**2) / 2) / 0.01))
    expected = 100 * model.fit(known, train.labels).score(queries, val.labels)
    assert NearestNeighbours(temperature=0.01).run(evaluated)[1].value == pytest.approx(expected, abs=0.3)
