"""Heads of one's own: training goes through the forward pass that validation goes through."""

import pytest
import torch
from mmpretrain.models.peft.lora import LoRALinear
from torch import nn
from torch.nn import functional as F

from mapet_mm.models import BEiTTokenHead, TokenPredictionHead
from mapet_mm.models.statistics import PredictionStatistics


class MLPBefore:
    """An MLP before the projection."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.mlp = nn.Sequential(nn.Linear(24, 24), nn.GELU())

    def forward(self, latents):
        return self.projection(self.mlp(latents))


class MLPTokenHead(MLPBefore, TokenPredictionHead):
    pass


class MLPBEiTHead(MLPBefore, BEiTTokenHead):
    pass


def with_lora(*args) -> TokenPredictionHead:
    head = TokenPredictionHead(*args)
    head.projection = LoRALinear(head.projection, rank=2)
    nn.init.normal_(head.projection.lora_up.weight)
    return head


def without_bias(*args) -> TokenPredictionHead:
    head = TokenPredictionHead(*args)
    head.projection = nn.Linear(24, 11, bias=False)
    return head


def squared(*args) -> TokenPredictionHead:
    """A hook changes the logits."""
    head = TokenPredictionHead(*args)
    head.projection.register_forward_hook(lambda _, __, logits: logits.square())
    return head


def replaced(*args) -> TokenPredictionHead:
    """A library has set the projection's forward pass."""
    head = TokenPredictionHead(*args)
    head.projection.forward = lambda latents: F.linear(latents, -head.projection.weight, head.projection.bias)
    return head


HEADS = [MLPTokenHead, with_lora, without_bias, squared, replaced, TokenPredictionHead]


@pytest.mark.parametrize("build", HEADS)
def test_training_goes_through_the_heads_own_forward_pass(build):
    """The loss is the mean of validation's, and every parameter gets the logits' gradient."""
    head, latents = build(24, 11), torch.randn(2, 7, 24)
    tokens = torch.randint(11, (2, 7))
    head.statistics = PredictionStatistics(11)
    figures = head.loss(latents, tokens)
    losses, accuracies = head.evaluate(latents, tokens)
    torch.testing.assert_close(figures["loss"], losses.mean())
    torch.testing.assert_close(figures["token_accuracy"], accuracies.mean())
    expected = F.cross_entropy(head(latents).flatten(0, 1), tokens.flatten())
    parameters = list(head.parameters())
    gradients = torch.autograd.grad(figures["loss"], parameters)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, parameters), strict=True):
        assert ours.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("max_masked", [None, 6])
def test_beits_head_goes_through_its_own_forward_pass(max_masked):
    head, latents = MLPBEiTHead(24, 11, max_masked=max_masked), torch.randn(2, 10, 24)
    tokens, mask = torch.randint(11, (2, 9)), torch.zeros(2, 3, 3, dtype=torch.int64)
    mask[0, :2], mask[1, 2, 1:] = 1, 1
    masked = mask.flatten(1).bool()
    expected = F.cross_entropy(head(latents)[:, 1:][masked], tokens[masked])
    loss = head.loss(latents, tokens, mask)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert head.mlp[0].weight.grad.abs().max() > 0
