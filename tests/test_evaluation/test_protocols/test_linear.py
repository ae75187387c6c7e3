"""Linear probes trained together equal classifiers trained alone."""

import copy
import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from clustered_features import (
    CLASSES,
    DIM,
    LAYERS,
    MemoryFeatures,
    as_evaluated,
    evaluated_clusters,
    one_pooling,
    rare_class,
    tenth_of_each_class,
)
from sklearn.metrics import accuracy_score, balanced_accuracy_score
from torch import nn
from torch.nn import functional as F

from mapet_mm.evaluation import features
from mapet_mm.evaluation.protocol import Evaluated
from mapet_mm.evaluation.protocols import probes
from mapet_mm.evaluation.protocols.linear import Chosen, LinearHeads, LinearProbes, rows_of_layers
from mapet_mm.evaluation.protocols.probes import shuffled_batches
from mapet_mm.evaluation.protocols.regression import Regression


@pytest.fixture(scope="module")
def evaluated() -> Evaluated:
    return evaluated_clusters()


@pytest.mark.parametrize(("made", "weights"), [(evaluated_clusters, None), (rare_class, [600 / 1140, 10.0])])
def test_a_probe_learns_what_it_learns_alone(made, weights, monkeypatch):
    """In a sweep, each equals a plain linear layer trained by torch's optimizer at its rate."""
    evaluated = made()
    num_classes = evaluated.num_classes
    weights = weights and torch.tensor(weights)
    monkeypatch.setattr(probes, "WINDOW_BYTES", 2**14)  # not all features fit into it
    train, val = evaluated.features["train"], evaluated.features["val"]
    options = dict(epochs=3, least_steps=1, batch_size=128)
    for layer, pooling, rate in ((0, "both", 0.01), (2, "mean", 0.1), (1, "class token", 1.0)):
        rows = LinearProbes([rate], **options).rows(evaluated)
        found = {row.setting: row.value for row in rows if row.detail}
        width = DIM * (2 if pooling == "both" else 1)
        alone = nn.Linear(width, num_classes)
        with torch.no_grad():
            start = torch.randn(num_classes, width, generator=torch.Generator().manual_seed(0)) * 0.01
            alone.weight.copy_(start)
            alone.bias.zero_()
        steps = torch.optim.SGD(alone.parameters(), momentum=0.9)
        own = tenth_of_each_class(train.labels)
        for step, (values, labels) in enumerate(
            shuffled_batches(train, "pooled", 128, 3, layer, without=own)
        ):
            cosine = (1 + math.cos(math.pi * step / 15)) / 2  # 5 batches an epoch
            steps.param_groups[0]["lr"] = rate / 2 * cosine  # in proportion to the batch
            steps.zero_grad()
            losses = F.cross_entropy(
                alone(values[:, train.columns(pooling)]), labels, weights, reduction="none"
            )
            losses.mean().backward()
            steps.step()
        predicted = alone(val.pooled(pooling, layer)).argmax(1)
        top1 = 100 * balanced_accuracy_score(val.labels, predicted)
        if weights is None:
            top1 = 100 * accuracy_score(val.labels, predicted)
        assert found[f"{pooling}, layer {train.layers[layer]}"] == pytest.approx(top1, abs=0.3)
        assert 30 < top1 < 99


@pytest.mark.parametrize(
    "protocol", [LinearProbes([0.01, 0.1], epochs=2, least_steps=2), Regression([0.01, 0.1])]
)
def test_rows_name_what_was_best(evaluated, protocol):
    rows = protocol.rows(evaluated)
    assert {row.protocol for row in rows} == {protocol.name}
    shown = [row for row in rows if not row.detail]
    poolings = ("class token", "mean", "both")
    assert [row.setting for row in shown] == [
        f"{one}, {which} layer" for one in poolings for which in ("last", "best")
    ]
    details = {row.setting: row for row in rows if row.detail}
    assert len(details) == 3 * LAYERS
    for row in shown[1::2]:
        pooling, place = row.setting.removesuffix(", best layer"), row.note.split(", ")[0]
        assert row.value == details[f"{pooling}, {place}"].value
    assert all(row.interval[0] < row.value < row.interval[1] for row in rows)


def test_the_best_layer_is_the_one_that_classifies_the_held_out_images_best(evaluated):
    """Not the one that classifies the reported images best, and of equals the first."""
    val = evaluated.features["val"]
    right = nn.functional.one_hot(val.labels, CLASSES).double()  # of the reported images
    tried = [("1", 60.0, right.roll(1, 1)), ("2", 80.0, right), ("3", 80.0, -right), ("output", 70.0, -right)]
    chosen = [
        Chosen(layer, top1, lambda _, scores=scores: scores, f"rate {layer}") for layer, top1, scores in tried
    ]
    train = copy.copy(evaluated.features["train"])
    train.layers = [layer for layer, *_ in tried]
    evaluated = replace(evaluated, features={"train": train, "val": val})
    rows = rows_of_layers(LinearProbes(), evaluated, lambda layer: defaultdict(lambda: chosen[layer]))
    last, best = [row for row in rows if row.setting.startswith("mean") and not row.detail]
    assert (last.setting, last.value, last.note) == ("mean, last layer", 0, "rate output")
    assert (best.setting, best.value, best.note) == ("mean, best layer", 100, "layer 2, rate 2")


@pytest.mark.parametrize("protocol", [LinearProbes([0.1], epochs=2, least_steps=100), Regression([1.0])])
def test_of_layers_with_and_without_classes_the_best_has_them(evaluated, protocol):
    banks = []
    for bank in evaluated.features.values():
        pooled = bank.values["pooled"].clone()
        pooled[[0, 2]] = torch.randn_like(pooled[[0, 2]])  # layers 1 and output know nothing
        known = dict(layers=bank.layers, poolings=bank.poolings, grid=bank.grid, labels=bank.labels)
        banks.append(MemoryFeatures(pooled, name=bank.name, **known))
    rows = {row.setting: row for row in protocol.rows(as_evaluated(*banks))}
    assert rows["mean, best layer"].note.startswith("layer 2, ")
    assert rows["mean, best layer"].value > 2 * rows["mean, last layer"].value


@pytest.mark.parametrize(
    ("rates", "scale", "note"),
    [
        ([1e-3, 0.1, 1e4], 1, "rate 0.1"),
        ([1e-6, 1e-3], 1, "rate 0.001 (the highest of the grid)"),
        ([0.1, 1e4], 1, "rate 0.1 (the lowest of the grid)"),
        ([0.1], 1, "rate 0.1"),
        ([1e-4, 2e-4], 0, "rate 0.0001, all rates alike"),
    ],
)
def test_a_best_rate_at_the_end_of_the_sweep_says_so(evaluated, rates, scale, note):
    """The features may be too small or too large for all rates."""
    banks = as_evaluated(*(one_pooling(bank, "mean", scale) for bank in evaluated.features.values()))
    assert LinearProbes(rates=rates, epochs=2, least_steps=2).rows(banks)[0].note == note


@pytest.mark.parametrize("window", [2**29, 3 * 16 * 4])
@pytest.mark.parametrize("kind", ["pooled", "tokens"])
def test_batches_cover_each_image_once_whatever_fits_in_memory(monkeypatch, window, kind):
    """All images in one window, or three blocks of 16 at a time."""
    monkeypatch.setattr(features, "BLOCK", 16)
    monkeypatch.setattr(probes, "WINDOW_BYTES", window)
    numbers = torch.arange(100.0)
    known = dict(layers=["output"], poolings=["mean"], grid=(1, 1), labels=torch.arange(100) % 7)
    bank = MemoryFeatures(numbers.view(1, 100, 1), numbers.view(100, 1, 1), name="train", **known)

    def order() -> torch.Tensor:
        batches = list(shuffled_batches(bank, kind, 10, epochs=2))
        values, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        assert torch.equal(values.flatten() % 7, labels)
        return values.view(2, 100)

    first, second = order()
    assert torch.equal(first.sort().values, numbers)
    assert torch.equal(order()[0], first)
    assert not torch.equal(first, second)
    blocks = first[:36].div(16, rounding_mode="floor").unique()  # the last of them has 4 images
    assert len(blocks) == 3 if window < 2**29 else len(blocks) > 3


def test_large_learning_rates_do_not_disturb_others(evaluated):
    """Heads that are computed together learn what each learns alone, also beside one that diverges."""
    protocol = LinearProbes(epochs=1, least_steps=1, batch_size=128)
    alone = LinearHeads(slice(0, DIM), CLASSES, [0.1])
    together = LinearHeads(slice(0, DIM), CLASSES, [0.1, 1e38, 1.0])
    protocol.trained(evaluated, [alone])
    protocol.trained(evaluated, [together])
    torch.testing.assert_close(together.weight[:1], alone.weight)
    assert not together.weight[1].isfinite().all()
    assert together.weight[2].isfinite().all()
