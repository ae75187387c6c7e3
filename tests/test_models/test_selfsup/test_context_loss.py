"""Losses of the visible patches: which tokens they are for, what they add, which parameters learn."""

import pytest
import torch
from small_pretraining import VISIBLE, batch, build
from torch.nn import functional as F

OBJECTIVES = ["mapet", "pim", "mim", "visible"]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_loss_is_that_of_the_targets_and_the_weighted_one_of_the_visible_patches(objective):
    model = build(objective)
    images, grids = batch()
    torch.manual_seed(1)
    losses = model([images, grids], mode="loss")
    torch.manual_seed(1)
    latents, permutation = model.latents(images, None, with_context=True)

    # Each patch's own cross-entropy, by its place in the grid.
    logits = model.head(latents)  # B 25 V, in permuted order
    patches = permutation[:, 1:] - 1
    tokens = grids.flatten(1).gather(1, patches)
    nats = F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
    context, targets = nats[:, :VISIBLE].mean(), nats[:, VISIBLE:].mean()
    assert losses["loss"].item() == pytest.approx((targets + 0.5 * context).item(), rel=1e-5)
    assert losses["target_nats"].item() == pytest.approx(targets.item(), rel=1e-5)
    assert losses["context_nats"].item() == pytest.approx(context.item(), rel=1e-5)
    hits = 100 * (logits.argmax(-1) == tokens).float()
    assert losses["context_accuracy"].item() == pytest.approx(hits[:, :VISIBLE].mean().item(), rel=1e-5)
    assert losses["token_accuracy"].item() == pytest.approx(hits[:, VISIBLE:].mean().item(), rel=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_what_is_minimised_is_the_loss_once(objective):
    """MMEngine sums every entry whose name says that it is a loss."""
    model = build(objective)
    losses = model(batch(), mode="loss")
    total, _ = model.parse_losses(losses)
    assert total.item() == losses["loss"].item()


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("context_loss", [0.0, 0.5])
def test_every_parameter_learns(objective, context_loss):
    model = build(objective, context_loss)
    model(batch(), mode="loss")["loss"].backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # A key's bias moves all scores of a row alike.
    assert still == []


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_targets_are_predicted_as_without_a_context_loss(objective):
    model = build(objective).eval()
    images, _ = batch()
    permutation = model.backbone.sample_permutation(3, "cpu")
    targets, _ = model.latents(images, permutation)
    of_all, _ = model.latents(images, permutation, with_context=True)
    torch.testing.assert_close(of_all[:, VISIBLE:], targets)


def test_a_context_loss_without_a_visible_patch_is_refused():
    """Its mean would be NaN."""
    with pytest.raises(ValueError, match="cutting_point=1 "):
        build("mapet", cutting_point=1)
