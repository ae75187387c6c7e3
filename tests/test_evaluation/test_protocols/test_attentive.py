"""The attentive probe equals a naive loop over heads."""

import math

import pytest
import torch
from clustered_features import CLASSES, DIM, evaluated_clusters
from torch import nn
from torch.nn import functional as F

from mapet_mm.evaluation.protocols import attentive
from mapet_mm.evaluation.protocols.attentive import AttentiveClassifier, AttentiveProbe
from mapet_mm.evaluation.protocols.probes import shuffled_batches


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


def test_equals_a_naive_loop(monkeypatch):
    """Trained on the same batches, the loop classifies as many images right."""
    monkeypatch.setattr(attentive, "HEAD_WIDTH", 4)
    evaluated = evaluated_clusters()
    train, val = evaluated.features["train"], evaluated.features["val"]
    rates = [1e-3, 2e-2]
    models = [AttentiveClassifier(DIM, CLASSES) for _ in rates]
    naive = NaiveAttention(models[0])
    found = AttentiveProbe(epochs=4, least_steps=1, batch_size=100).top1(evaluated, models, rates)
    assert (models[0].heads, AttentiveClassifier(18, CLASSES).heads) == (4, 3)  # which divide the width
    steps = torch.optim.AdamW(naive.parameters(), weight_decay=5e-4)
    for step, (tokens, labels) in enumerate(shuffled_batches(train, "tokens", 100, epochs=4)):
        cosine = (1 + math.cos(math.pi * step / 24)) / 2  # 6 batches an epoch
        steps.param_groups[0]["lr"] = 2e-2 * min((step + 1) / 2, cosine)
        steps.zero_grad()
        F.cross_entropy(naive(tokens), labels).backward()
        steps.step()
    tokens = torch.cat([tokens for _, tokens in val.blocks("tokens")])
    top1 = 100 * (naive(tokens).argmax(1) == val.labels).float().mean().item()
    assert found[1] == pytest.approx(top1, abs=0.2)
    assert top1 > 50


def test_one_row_of_the_best_rate_and_none_without_patches():
    evaluated = evaluated_clusters()
    (row,) = AttentiveProbe(rates=[1e-9, 1e-2], least_steps=30, epochs=1).run(evaluated)
    assert row.value > 30
    assert row.note == "rate 0.01"
    evaluated.features["train"].grid = (0, 0)
    assert AttentiveProbe().run(evaluated) == []
