"""The blockwise linear cross-entropy is PyTorch's, loss and gradients, in every precision."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from mapet_mm.models.losses import linear_cross_entropy as losses
from mapet_mm.models.losses.linear_cross_entropy import cross_entropy, linear_cross_entropy


def operands(rows=50, dim=12, vocab=30, dtype=torch.float32):
    latents, weight = torch.randn(rows, dim, dtype=dtype), torch.randn(vocab, dim, dtype=dtype) / 4
    bias, targets = torch.randn(vocab, dtype=dtype), torch.randint(vocab, (rows,))
    return [x.requires_grad_() for x in (latents, weight, bias)], targets


def reference(parameters, targets):
    """Loss, hits and gradients of PyTorch's linear layer and cross-entropy."""
    logits = F.linear(*parameters)
    loss = F.cross_entropy(logits, targets)
    hits = (logits.argmax(1) == targets).sum()
    return loss, hits, torch.autograd.grad(loss, parameters)


@pytest.mark.parametrize("rows", [1, 7, 16, 1000])  # of a block: one, uneven, even, all
def test_equals_linear_and_cross_entropy(rows, monkeypatch):
    monkeypatch.setattr(losses, "BLOCK_ELEMENTS", {"cpu": 30 * rows})
    parameters, targets = operands()
    expected_loss, expected_hits, expected = reference(parameters, targets)
    loss, hits = linear_cross_entropy(*parameters, targets)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    assert hits == expected_hits
    for ours, theirs in zip(torch.autograd.grad(loss, parameters), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_large_logits_neither_overflow_nor_lose_the_loss():
    """Logits around 1e4, the target's 20 below the largest: a loss of 20 nats."""
    weight = torch.tensor([[1e4], [1e4 - 20], [-1e4]])
    loss, hits = linear_cross_entropy(
        torch.ones(4, 1), weight, torch.zeros(3), torch.ones(4, dtype=torch.int64)
    )
    assert loss.item() == pytest.approx(20, rel=1e-4)
    assert hits == 0


@pytest.mark.parametrize(("elements", "rows"), [(500, [16, 16, 16, 2]), (29, [1] * 50)])
def test_a_block_has_as_many_rows_as_its_logits_have_room_for(elements, rows, monkeypatch):
    """And one row where a vocabulary alone fills it."""
    products, multiply = [], torch.addmm
    monkeypatch.setattr(losses, "BLOCK_ELEMENTS", {"cpu": elements})
    monkeypatch.setattr(torch, "addmm", lambda *x: products.append(multiply(*x)) or products[-1])
    parameters, targets = operands()
    linear_cross_entropy(*parameters, targets)
    assert [tuple(product.shape) for product in products] == [(number, 30) for number in rows]


def test_blocks_are_of_8_mib_on_cpu_and_640_mib_elsewhere():
    assert losses.BLOCK_ELEMENTS == {"cpu": 8 * 2**20 // 4}
    assert losses.BLOCK_ELEMENTS_ELSEWHERE == 640 * 2**20 // 4
    assert losses.FLOAT16_ROWS == 2048


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_autocast_is_as_exact_as_pytorchs_own(device):
    """Against float64, the gradients' error is at most a half more than that of autocast linear and loss."""
    parameters, targets = operands(rows=400, dim=64, vocab=500)
    parameters = [x.detach().to(device).requires_grad_() for x in parameters]
    targets = targets.to(device)
    _, _, exact = reference([x.detach().double().requires_grad_() for x in parameters], targets)
    with torch.autocast(device, torch.bfloat16):
        _, _, theirs = reference(parameters, targets)
        loss, _ = linear_cross_entropy(*parameters, targets)
    ours = torch.autograd.grad(loss, parameters)
    for x, y, truth in zip(ours, theirs, exact, strict=True):
        assert x.dtype is torch.float32
        assert (x - truth).norm() < 1.5 * (y - truth).norm() + 1e-7


def test_gradients_survive_float16_and_loss_scaling():
    """A gradient of 1e-8 is nothing in float16; the loss scale has to reach it first."""
    parameters, targets = operands(rows=64, dtype=torch.float16)
    parameters = [(x.detach() / 100).requires_grad_() for x in parameters]
    loss, _ = linear_cross_entropy(*parameters, targets)
    scaled = torch.autograd.grad(loss * 1024, parameters[0])[0].double() / 1024
    _, _, exact = reference([x.detach().double().requires_grad_() for x in parameters], targets)
    assert (scaled - exact[0]).norm() < 2e-3 * exact[0].norm()


def test_a_gradient_over_many_alike_targets_survives_float16(monkeypatch):
    """Plain background: each target asks for the same. No loss scale brings back a sum that is infinite."""
    monkeypatch.setattr(losses, "BLOCK_ELEMENTS", {"cpu": losses.BLOCK_ELEMENTS_ELSEWHERE})
    latents = torch.full((40_000, 2), 2.0, dtype=torch.float16)
    weight = torch.zeros(64, 2, dtype=torch.float16, requires_grad=True)
    bias = torch.zeros(64, dtype=torch.float16, requires_grad=True)
    loss, _ = linear_cross_entropy(latents, weight, bias, torch.zeros(40_000, dtype=torch.int64))
    loss.backward()
    expected = torch.full((64, 2), 2 / 64)
    expected[0] -= 2
    torch.testing.assert_close(weight.grad.float(), expected, rtol=1e-3, atol=1e-4)


def test_nothing_is_kept_where_no_gradient_is_asked_for():
    """Nor computed: one product makes the logits, two more the gradients."""
    parameters, targets = operands()
    product = 2 * 50 * 12 * 30
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(*parameters, targets)
    assert counter.get_total_flops() == 3 * product
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        loss, _ = linear_cross_entropy(*parameters, targets)
    assert counter.get_total_flops() == product
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(reference(parameters, targets)[0].item(), rel=1e-6)


def test_frozen_head_still_gives_the_latents_gradient():
    (latents, weight, bias), targets = operands()
    loss, _ = linear_cross_entropy(latents, weight.detach(), bias.detach(), targets)
    expected = reference([latents, weight, bias], targets)[2][0]
    torch.testing.assert_close(torch.autograd.grad(loss, latents)[0], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rows", [7, 1000])
def test_rows_that_do_not_count_are_as_if_they_were_not_there(rows, monkeypatch):
    monkeypatch.setattr(losses, "BLOCK_ELEMENTS", {"cpu": 30 * rows})
    parameters, targets = operands()
    counted = torch.rand(50) < 0.4
    latents, weight, bias = parameters
    with torch.no_grad():  # rows whose target is the largest logit, counted and not
        targets[::3] = F.linear(latents, weight, bias).argmax(1)[::3]
    logits = F.linear(latents[counted], weight, bias)
    expected_loss = F.cross_entropy(logits, targets[counted])
    expected_hits = (logits.argmax(1) == targets[counted]).sum()
    expected = torch.autograd.grad(expected_loss, parameters)
    loss, hits = linear_cross_entropy(*parameters, targets, counted)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    assert 0 < hits == expected_hits
    for ours, theirs in zip(torch.autograd.grad(loss, parameters), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_a_second_derivative_is_refused():
    """The stored gradients are no functions of the operands: it would be wrong without a sign."""
    (latents, weight, bias), targets = operands()
    loss, _ = linear_cross_entropy(latents, weight, bias, targets)
    (gradient,) = torch.autograd.grad(loss.square(), latents, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
def test_it_is_the_loss_of_the_logits(some):
    """`cross_entropy` gives loss and hits of the logits; in bfloat16 it adds up in float32."""
    (latents, weight, bias), targets = operands(rows=300)
    counted = torch.rand(300) < 0.5 if some else None
    loss, hits = linear_cross_entropy(latents, weight, bias, targets, counted)
    logits = F.linear(latents, weight, bias)
    other_loss, other_hits = cross_entropy(logits, targets, counted)
    torch.testing.assert_close(loss, other_loss)
    assert hits == other_hits
    rounded = cross_entropy(logits.bfloat16(), targets, counted)[0]
    assert rounded.dtype is torch.float32
    assert rounded.item() == pytest.approx(loss.item(), rel=1e-2)
