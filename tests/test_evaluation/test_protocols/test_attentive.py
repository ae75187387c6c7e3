"""The attentive probe equals a naive loop over heads."""

import math
from functools import partial

import pytest
import torch
from clustered_features import CLASSES, DIM, evaluated_clusters
from torch import nn
from torch.nn import functional as F

from mapet_mm.evaluation.protocols import attentive
from mapet_mm.evaluation.protocols.attentive import AttentiveClassifier, AttentiveProbe
from mapet_mm.evaluation.protocols.probes import ShuffledBatches, train_heads


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
    optimizer = partial(torch.optim.AdamW, weight_decay=5e-4)
    train_heads(models, rates, ShuffledBatches(train, "tokens", 100), 4, optimizer, warmup=0.1)
    assert (models[0].heads, AttentiveClassifier(18, CLASSES).heads) == (4, 3)  # which divide the width
    steps, step = optimizer(naive.parameters(), lr=2e-2), 0
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
    assert top1[0] == pytest.approx(top1[1], abs=0.2)
    assert top1[0] > 50


def test_one_row_of_the_best_rate_and_none_without_patches():
    evaluated = evaluated_clusters()
    (row,) = AttentiveProbe(rates=[1e-9, 1e-2], least_steps=30, epochs=1).run(evaluated)
    assert row.value > 30
    assert row.note == "rate 0.01"
    evaluated.features["train"].grid = (0, 0)
    assert AttentiveProbe().run(evaluated) == []
