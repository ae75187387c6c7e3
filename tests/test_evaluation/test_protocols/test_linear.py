"""Linear probes trained together equal classifiers trained alone."""

import math

import pytest
import torch
from clustered_features import CLASSES, DIM, LAYERS, as_evaluated, evaluated_clusters, one_pooling
from torch import nn
from torch.nn import functional as F

from mapet_mm.evaluation import features
from mapet_mm.evaluation.features import MemoryFeatures
from mapet_mm.evaluation.protocol import Evaluated
from mapet_mm.evaluation.protocols import probes
from mapet_mm.evaluation.protocols.linear import LinearHead, LinearProbes
from mapet_mm.evaluation.protocols.probes import shuffled_batches


@pytest.fixture(scope="module")
def evaluated() -> Evaluated:
    return evaluated_clusters()


def test_a_probe_learns_what_it_learns_alone(evaluated):
    """Of 27 in a sweep, each equals a plain linear layer trained by torch's optimizer at its rate."""
    train, val = evaluated.features["train"], evaluated.features["val"]
    options = dict(epochs=3, least_steps=1, batch_size=128)
    for layer, pooling, rate in ((0, "both", 0.01), (2, "mean", 0.1), (1, "class token", 1.0)):
        rows = LinearProbes([rate], weight_decay=0.01, **options).run(evaluated)
        found = {row.setting: row.value for row in rows if row.detail}
        width = DIM * (2 if pooling == "both" else 1)
        alone = nn.Linear(width, CLASSES)
        with torch.no_grad():
            alone.weight.copy_(torch.randn(CLASSES, width, generator=torch.Generator().manual_seed(0)) * 0.01)
            alone.bias.zero_()
        steps = torch.optim.SGD(alone.parameters(), momentum=0.9, weight_decay=0.01)
        for step, (values, labels) in enumerate(shuffled_batches(train, "pooled", 128, 3, layer)):
            cosine = (1 + math.cos(math.pi * step / 15)) / 2  # 5 batches an epoch
            steps.param_groups[0]["lr"] = rate / 2 * cosine  # in proportion to the batch
            steps.zero_grad()
            F.cross_entropy(alone(values[:, train.columns(pooling)]), labels).backward()
            steps.step()
        top1 = 100 * (alone(val.pooled(pooling, layer)).argmax(1) == val.labels).float().mean().item()
        assert found[f"{pooling}, layer {train.layers[layer]}"] == pytest.approx(top1, abs=0.2)
        assert 30 < top1 < 99


def test_rows_name_what_was_best(evaluated):
    rows = LinearProbes(rates=[0.01, 0.1], epochs=2, least_steps=2).run(evaluated)
    shown = [row for row in rows if not row.detail]
    poolings = ("class token", "mean", "both")
    assert [row.setting for row in shown] == [
        f"{one}, {which} layer" for one in poolings for which in ("last", "best")
    ]
    details = {row.setting: row.value for row in rows if row.detail}
    assert len(details) == 3 * LAYERS
    for row in shown[1::2]:
        pooling, place = row.setting.removesuffix(", best layer"), row.note.split(", ")[0]
        assert row.value == details[f"{pooling}, {place}"]
        assert row.value == max(value for setting, value in details.items() if setting.startswith(pooling))


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
        batches = list(shuffled_batches(bank, kind, 10, epochs=2, seed=3))
        values, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        assert torch.equal(values.flatten() % 7, labels)
        return values.view(2, 100)

    first, second = order()
    assert torch.equal(first.sort().values, numbers)
    assert torch.equal(order()[0], first)
    assert not torch.equal(first, second)
    blocks = first[:36].div(16, rounding_mode="floor").unique()  # the last of them has 4 images
    assert len(blocks) == 3 if window < 2**29 else len(blocks) > 3


@pytest.mark.parametrize("rates", [[], [0.0]])
def test_impossible_rates_are_refused(rates):
    with pytest.raises(ValueError, match="rate"):
        LinearProbes(rates=rates)


def test_large_learning_rates_do_not_disturb_others(evaluated):
    """Each head has a parameter group of its own."""
    alone, together, broken = (LinearHead(slice(0, DIM), CLASSES) for _ in range(3))
    protocol = LinearProbes(epochs=1, least_steps=1, batch_size=128)
    protocol.top1(evaluated, [alone], [0.1])
    protocol.top1(evaluated, [together, broken], [0.1, 1e38])
    assert torch.equal(alone.weight, together.weight)
    assert not broken.weight.isfinite().all()
