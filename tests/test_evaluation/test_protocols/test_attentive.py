"""The attentive probe equals a naive loop over heads."""

import math

import pytest
import torch
from clustered_features import CLASSES, DIM, evaluated_clusters, tenth_of_each_class
from torch import nn
from torch.nn import functional as F

from mapet_mm.evaluation.protocols import attentive
from mapet_mm.evaluation.protocols.attentive import AttentiveHeads, AttentiveProbe
from mapet_mm.evaluation.protocols.probes import shuffled_batches


class NaiveAttention(nn.Module):
    """Keys and values of every token, one head at a time."""

    def __init__(self, stack: AttentiveHeads, index: int):
        super().__init__()
        self.heads = stack.num_attentions
        for name, value in stack.named_parameters():
            setattr(self, name, nn.Parameter(value.detach()[index].clone()))

    def forward(self, tokens):
        keys, values = tokens @ self.key.T, tokens @ self.value.T + self.value_bias  # B N D
        parts = []
        for q, k, v in zip(*(x.chunk(self.heads, -1) for x in (self.query, keys, values)), strict=True):
            weights = (k @ q / math.sqrt(len(q))).softmax(1)  # B N
            parts.append((weights[..., None] * v).sum(1))
        return torch.cat(parts, 1) @ self.classifier.T + self.bias


def test_equals_a_naive_loop(monkeypatch):
    """Trained on the same batches, without decay of biases, the loop classifies as many images right."""
    monkeypatch.setattr(attentive, "HEAD_WIDTH", 4)
    evaluated = evaluated_clusters()
    train, val = evaluated.features["train"], evaluated.features["val"]
    probe = AttentiveProbe(epochs=4, least_steps=1, batch_size=100)
    stack = AttentiveHeads(DIM, CLASSES, [1e-3, 5e-2], [5e-4, 0.1])
    naive = NaiveAttention(stack, 1)
    ((_, chooses),) = probe.trained(evaluated, [stack])
    # Numbers of attention heads that divide the width.
    assert (stack.num_attentions, AttentiveHeads(18, CLASSES, [1.0], [0.0]).num_attentions) == (4, 3)
    weights = [value for name, value in naive.named_parameters() if "bias" not in name]
    biases = [{"params": [naive.value_bias, naive.bias], "weight_decay": 0.0}, {"params": weights}]
    steps = torch.optim.AdamW(biases, betas=(0.9, 0.95), weight_decay=0.1)
    own = tenth_of_each_class(train.labels)
    for step, (tokens, labels) in enumerate(shuffled_batches(train, "tokens", 100, epochs=4, without=own)):
        cosine = (1 + math.cos(math.pi * step / 24)) / 2  # 6 batches an epoch, the last with 40 images
        for group in steps.param_groups:
            group["lr"] = 5e-2 * 100 / 256 * min((step + 1) / 2, cosine)
        steps.zero_grad()
        F.cross_entropy(naive(tokens), labels).backward()
        steps.step()
    for bank, rows, found in (
        (train, own, chooses),
        (val, slice(None), 100 * (probe.scores(stack.only(1), val).argmax(1) == val.labels).float().mean()),
    ):
        tokens = torch.cat([tokens for _, tokens in bank.blocks("tokens")])[rows]
        top1 = 100 * (naive(tokens).argmax(1) == bank.labels[rows]).float().mean().item()
        assert float(found) == pytest.approx(top1, abs=0.3 if bank is val else 1.7)  # one image
        assert top1 > 50


def test_the_grid_is_capis():
    probe = AttentiveProbe()
    assert (len(probe.rates), max(probe.rates), attentive.DECAYS) == (10, 1e-2, (5e-4, 1e-3, 5e-2))
    optimizer = probe.optimizer([nn.Parameter(torch.zeros(1))], 1.0)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (optimizer.defaults["betas"], optimizer.defaults["weight_decay"]) == ((0.9, 0.95), 0.0)


def test_one_row_of_the_best_setting_and_none_without_patches(monkeypatch):
    monkeypatch.setattr(attentive, "DECAYS", [0.01])
    evaluated = evaluated_clusters()
    (row,) = AttentiveProbe(rates=[1e-9, 2e-2], least_steps=30, epochs=1).rows(evaluated)
    assert row.value > 30
    assert row.note == "rate 0.02 (the highest of the grid), decay 0.01"
    evaluated.features["train"].grid = (0, 0)
    assert AttentiveProbe().rows(evaluated) == []
