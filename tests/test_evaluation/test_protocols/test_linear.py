"""Linear probes trained together equal classifiers trained alone."""

import math
from functools import partial

import pytest
import torch
from clustered_features import CLASSES, DIM, LAYERS, as_evaluated, evaluated_clusters, one_pooling
from mmpretrain.structures import DataSample
from torch import nn
from torch.nn import functional as F

from mapet_mm.evaluation import features
from mapet_mm.evaluation.features import MemoryFeatures
from mapet_mm.evaluation.protocol import Evaluated
from mapet_mm.evaluation.protocols import linear, probes
from mapet_mm.evaluation.protocols.linear import (
    BEiTLinearProbes,
    LinearHead,
    LinearProbes,
    Probe,
    parts,
)
from mapet_mm.evaluation.protocols.probes import ShuffledBatches, accuracies, train_heads
from mapet_mm.models.heads.linear_probe import LayerwiseLinearHead


@pytest.fixture(scope="module")
def evaluated() -> Evaluated:
    return evaluated_clusters()


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_probe_learns_what_it_learns_alone(evaluated, optimizer):
    """Of 18 trained together, each equals a plain linear layer trained by torch's optimizer at its rate."""
    train, val = evaluated.features["train"], evaluated.features["val"]
    rates = (0.01, 0.1, 1.0) if optimizer == "SGD" else (1e-3, 1e-2)
    batches = ShuffledBatches(train, "pooled", 128)
    wanted = [Probe(layer, one, rate) for layer in range(LAYERS) for one in train.poolings for rate in rates]
    heads = [LinearHead(probe, train, CLASSES) for probe in wanted]
    build = partial(linear.OPTIMIZERS[optimizer], weight_decay=0.01)
    train_heads(heads, [probe.rate / 2 for probe in wanted], batches, 3, build)
    found = dict(zip(wanted, accuracies(heads, val, "pooled"), strict=True))
    for layer, pooling, rate in ((0, "both", rates[0]), (2, "mean", rates[1]), (1, "class token", rates[-1])):
        width = DIM * (2 if pooling == "both" else 1)
        alone = nn.Linear(width, CLASSES)
        with torch.no_grad():
            alone.weight.copy_(torch.randn(CLASSES, width, generator=torch.Generator().manual_seed(0)) * 0.01)
            alone.bias.zero_()
        lr, kind = rate / 2, dict(momentum=0.9) if optimizer == "SGD" else {}
        steps = getattr(torch.optim, optimizer)(alone.parameters(), lr=lr, weight_decay=0.01, **kind)
        step = 0
        for epoch in range(3):
            for values, labels in ShuffledBatches(train, "pooled", 128).epoch(epoch):
                cosine = (1 + math.cos(math.pi * step / 15)) / 2  # 5 batches an epoch
                steps.param_groups[0]["lr"] = lr * cosine
                steps.zero_grad()
                F.cross_entropy(alone(values[layer][:, train.columns(pooling)]), labels).backward()
                steps.step()
                step += 1
        top1 = 100 * (alone(val.pooled(pooling, layer)).argmax(1) == val.labels).float().mean().item()
        assert found[Probe(layer, pooling, rate)] == pytest.approx(top1, abs=0.2)
        assert 30 < top1 < 99


def test_probes_do_not_depend_on_memory(evaluated, monkeypatch):
    """In one part or in many, which keep to the limit, the same classifiers."""
    protocol = LinearProbes(rates=[0.03, 0.3], epochs=1, least_steps=1)
    rows = protocol.run(evaluated)
    monkeypatch.setattr(linear, "MEMORY_BYTES", 16 * CLASSES * (2 * DIM + 1))
    wanted = [Probe(layer, pooling, 0.1) for layer in range(LAYERS) for pooling in ("class token", "both")]
    divided = list(parts(wanted, evaluated.features["train"], CLASSES))
    assert [probe for part in divided for probe in part] == wanted
    assert [len(part) for part in divided] == [1] * 6
    assert protocol.run(evaluated) == rows


def test_beits_probe_starts_and_steps_like_the_head_of_the_recipes(evaluated):
    """`LayerwiseLinearHead`, which the recipes train on images, has the same logits and gradient."""
    train = evaluated.features["train"]
    values, labels = next(ShuffledBatches(train, "pooled", 64).epoch(0))
    ours = LinearHead(Probe(1, "both", 0.1), train, CLASSES)
    head = LayerwiseLinearHead(CLASSES, DIM, layers=LAYERS)
    with torch.no_grad():
        for classifier in head.classifiers:
            classifier.weight.copy_(ours.weight)
            classifier.bias.copy_(ours.bias)
    tokens = values[1].unflatten(1, (2, DIM))  # B 2 D: class token and one patch, which is its mean
    torch.testing.assert_close(head.layer_logits([tokens] * LAYERS)[1], ours(values))
    samples = [DataSample().set_gt_label(label) for label in labels.tolist()]
    head.loss([tokens] * LAYERS, samples)["loss"].backward()
    F.cross_entropy(ours(values), labels).backward()
    torch.testing.assert_close(head.classifiers[1].weight.grad, ours.weight.grad)


def test_rows_name_what_was_best(evaluated):
    protocol = LinearProbes(rates=[0.01, 0.1], epochs=2, least_steps=2)
    rows = protocol.run(evaluated)
    shown = [row for row in rows if not row.detail]
    poolings = ("class token", "mean", "both")
    assert [row.setting for row in shown] == [
        f"{one}, {which} layer" for one in poolings for which in ("last", "best")
    ]
    details = {row.setting: row.value for row in rows if row.detail}
    assert len(details) == 9
    for row in shown[1::2]:
        pooling, place = row.setting.removesuffix(", best layer"), row.note.split(", ")[0]
        assert row.value == details[f"{pooling}, {place}"]
        assert row.value == max(value for setting, value in details.items() if setting.startswith(pooling))
    (section,) = protocol.sections(evaluated, rows)
    (axes,) = section.figures[0].axes
    assert axes.lines[0].get_ydata().tolist() == [
        details[f"class token, layer {n}"] for n in (1, 2, "output")
    ]
    beit = [row.setting for row in BEiTLinearProbes(least_steps=2, epochs=1).run(evaluated) if row.detail]
    assert beit == ["both, layer 1", "both, layer 2"]  # "output" has a norm


@pytest.mark.parametrize(
    ("rates", "scale", "note"),
    [
        ([1e-3, 0.1, 1e4], 1, "rate 0.1"),
        ([1e-6, 1e-4], 1, "rate 0.0001, the highest of the sweep"),
        ([0.1, 1e4], 1, "rate 0.1, the lowest of the sweep"),
        ([0.1], 1, "rate 0.1"),
        ([1e-4, 2e-4], 0, "rate 0.0001, all rates alike"),
    ],
)
def test_a_best_rate_at_the_end_of_the_sweep_says_so(evaluated, rates, scale, note):
    """The features may be too small or too large for all rates."""
    banks = as_evaluated(*(one_pooling(bank, "mean", scale) for bank in evaluated.features.values()))
    assert LinearProbes(rates=rates, epochs=2, least_steps=2).run(banks)[0].note == note


def test_a_pooling_that_the_backbone_lacks_gives_no_rows(evaluated, capsys):
    banks = as_evaluated(*(one_pooling(bank, "mean") for bank in evaluated.features.values()))
    for protocol in (BEiTLinearProbes(), LinearProbes(poolings=["class token"])):
        assert protocol.run(banks) == protocol.sections(banks, []) == []
        assert "the backbone gives mean only" in capsys.readouterr().out


@pytest.mark.parametrize("window", [2**29, 3 * 16 * 4])
@pytest.mark.parametrize("kind", ["pooled", "tokens"])
def test_batches_cover_each_image_once_whatever_fits_in_memory(monkeypatch, window, kind):
    """All images in one window, or three blocks of 16 at a time."""
    monkeypatch.setattr(features, "BLOCK", 16)
    monkeypatch.setattr(probes, "WINDOW_BYTES", window)
    numbers = torch.arange(100.0)
    known = dict(layers=["output"], poolings=["mean"], grid=(1, 1), labels=torch.arange(100) % 7)
    bank = MemoryFeatures(numbers.view(1, 100, 1), numbers.view(100, 1, 1), name="train", **known)
    batches = ShuffledBatches(bank, kind, 10, seed=3)

    def order(epoch: int) -> list[tuple[float, int]]:
        return [
            pair
            for values, labels in batches.epoch(epoch)
            for pair in zip(values.flatten().tolist(), labels.tolist(), strict=True)
        ]

    first = order(1)
    assert sorted(value for value, _ in first) == numbers.tolist() != [value for value, _ in first]
    assert all(int(value) % 7 == label for value, label in first)
    assert order(1) == first != order(2)
    if window < 2**29:
        assert batches._held[1].numel() <= 48


REFUSED = [
    (dict(rates=[]), "rate"),
    (dict(rates=[0.0]), "rate"),
    (dict(optimizer="LARS"), "SGD"),
    (dict(poolings=["max"]), "class token"),
    (dict(poolings=[]), "class token"),
]


@pytest.mark.parametrize(("options", "named"), REFUSED)
def test_impossible_options_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        LinearProbes(**options)


def test_large_learning_rates_do_not_disturb_others(evaluated):
    """Each head has a parameter group of its own."""
    bank, probe = evaluated.features["train"], Probe(0, "mean", 0.1)
    alone, together, broken = (LinearHead(probe, bank, CLASSES) for _ in range(3))
    for heads, rates in (([alone], [0.1]), ([together, broken], [0.1, 1e38])):
        train_heads(heads, rates, ShuffledBatches(bank, "pooled", 128), 1, linear.OPTIMIZERS["SGD"])
    assert torch.equal(alone.weight, together.weight)
    assert not broken.weight.isfinite().all()


def test_steps_are_in_proportion_to_the_batch(evaluated, monkeypatch):
    rates = []
    monkeypatch.setattr(probes, "train_heads", lambda heads, given, *_: rates.extend(given))
    LinearProbes(rates=[0.1], poolings=["mean"], batch_size=64).run(evaluated)
    assert rates == [0.025] * LAYERS
