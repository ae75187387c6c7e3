"""Heads of one's own: training goes through the forward pass that validation goes through."""

import pytest
import torch
from mmpretrain.models.peft.lora import LoRALinear
from torch import nn
from torch.nn import functional as F

from mapet_mm.models import TokenPredictionHead
from mapet_mm.models.target_generators.token_ids import nan_without_tokens


class MLPTokenHead(TokenPredictionHead):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.mlp = nn.Sequential(nn.Linear(24, 24), nn.GELU())

    def forward(self, latents):
        return self.projection(self.mlp(latents))


def with_lora(*args) -> TokenPredictionHead:
    head = TokenPredictionHead(*args)
    head.projection = LoRALinear(head.projection, rank=2)
    nn.init.normal_(head.projection.lora_up.weight)
    return head


def without_bias(*args) -> TokenPredictionHead:
    head = TokenPredictionHead(*args)
    head.projection = nn.Linear(24, 11, bias=False)
    return head


HEADS = [MLPTokenHead, with_lora, without_bias, TokenPredictionHead]


@pytest.mark.parametrize("build", HEADS)
def test_training_goes_through_the_heads_own_forward_pass(build):
    head, latents = build(24, 11), torch.randn(2, 7, 24)
    tokens = torch.randint(11, (2, 7))
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


@pytest.mark.parametrize("build", [TokenPredictionHead, without_bias])
def test_in_float64_the_loss_is_of_float64(build):
    head, latents = build(24, 11).double(), torch.randn(2, 7, 24, dtype=torch.float64)
    tokens = torch.randint(11, (2, 7))
    loss = head.loss(latents, tokens)["loss"]
    expected = F.cross_entropy(head(latents).flatten(0, 1), tokens.flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
    for parameter in head.parameters():
        ours, theirs = (torch.autograd.grad(x, parameter, retain_graph=True)[0] for x in (loss, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


class OwnLossHead(TokenPredictionHead):
    """Labels smoothed over all tokens."""

    def cross_entropy(self, latents, tokens, counted=None):
        logits, targets = self(latents).flatten(0, 1), tokens.clamp(min=0).flatten()
        loss = F.cross_entropy(logits, targets, label_smoothing=0.1)
        return loss * nan_without_tokens(tokens.flatten()), (logits.argmax(1) == targets).sum()


def test_a_loss_of_ones_own_trains():
    head, latents, tokens = OwnLossHead(24, 11), torch.randn(2, 7, 24), torch.randint(11, (2, 7))
    log_shares = head(latents).flatten(0, 1).log_softmax(1)
    smoothed = -0.9 * log_shares.gather(1, tokens.view(-1, 1)).mean() - 0.1 * log_shares.mean()
    torch.testing.assert_close(head.loss(latents, tokens)["loss"], smoothed)


class LastThird(TokenPredictionHead):
    """The example of CONTRIBUTING.md."""

    def loss(self, latents, tokens):
        num_left_out = tokens.shape[1] - tokens.shape[1] // 3
        return super().loss(latents[:, num_left_out:], tokens[:, num_left_out:])


def test_a_head_may_count_a_part_of_the_targets():
    head, latents, tokens = LastThird(24, 11), torch.randn(2, 7, 24), torch.randint(11, (2, 7))
    losses = F.cross_entropy(head(latents).flatten(0, 1), tokens.flatten(), reduction="none").view(2, 7)
    torch.testing.assert_close(head.loss(latents, tokens)["loss"], losses[:, 5:].mean())
