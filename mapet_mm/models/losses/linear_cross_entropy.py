"""Linear layer and cross-entropy in one, without ever holding the logits of a whole batch.

This file goes when the oldest PyTorch that we support is 2.13, which has
`torch.nn.functional.linear_cross_entropy`.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mapet_mm.utils.precision import product_dtype, sum_dtype

# Rows times classes of one block: 8 MiB in float32 on CPU, the fastest that was measured; on a GPU 640
# MiB, 20,480 targets of 8,192 ids: the recipes' batches are one block, twice their images two.
BLOCK_ELEMENTS = {"cpu": 2**21}
BLOCK_ELEMENTS_ELSEWHERE = 20_480 * 8192
# Largest block in float16: its gradients are summed before they are divided by the number of targets.
FLOAT16_ROWS = 2048


def linear_cross_entropy(
    latents: Float[Tensor, "target dim"],
    weight: Float[Tensor, "vocab dim"],
    bias: Float[Tensor, " vocab"],
    targets: Int64[Tensor, " target"],
    counted: Bool[Tensor, " target"] | None = None,
) -> tuple[Float[Tensor, ""], Int64[Tensor, ""]]:
    """Mean cross-entropy (nats) of `latents @ weight.T + bias`, and the number of hits (largest logits).

    The logits are made block by block, and with them the gradients, which are exact; under autocast the
    products run in its precision, and softmax and sums in float32 (`sum_dtype`), as PyTorch's own would.
    Where nothing asks for a gradient, all logits are there at once. All targets count if `counted` is None.

    Examples:
        >>> latents, weight, bias = torch.randn(6, 4), torch.randn(10, 4), torch.zeros(10)
        >>> loss, hits = linear_cross_entropy(latents, weight, bias, torch.arange(6))
        >>> torch.allclose(loss, F.cross_entropy(latents @ weight.T + bias, torch.arange(6)))
        True
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (latents, weight, bias)):
        return _LinearCrossEntropy.apply(latents, weight, bias, targets, counted)
    return cross_entropy(F.linear(latents, weight, bias), targets, counted)


def cross_entropy(
    logits: Float[Tensor, "target vocab"],
    targets: Int64[Tensor, " target"],
    counted: Bool[Tensor, " target"] | None = None,
) -> tuple[Float[Tensor, ""], Int64[Tensor, ""]]:
    """`linear_cross_entropy` from the logits `(R, V)` of a head with more than a linear layer."""
    losses = F.cross_entropy(logits.to(sum_dtype(logits.dtype)), targets, reduction="none")
    hits = logits.detach().argmax(1) == targets
    if counted is None:
        return losses.mean(), hits.sum()
    return losses.where(counted, 0).sum() / counted.sum(), (hits & counted).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        latents, weight, bias, targets, counted = arguments
        dtype = product_dtype(latents)
        operands = [operand.to(dtype) for operand in (latents, weight, bias)]
        with torch.autocast(latents.device.type, enabled=False):
            loss, hits, *gradients = _by_blocks(*operands, targets, counted)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(hits)
        ctx.num_targets = len(targets) if counted is None else counted.sum()
        ctx.dtypes = (latents.dtype, weight.dtype, bias.dtype)
        return loss / ctx.num_targets, hits

    @staticmethod
    @once_differentiable  # a second derivative would take the stored gradients for constants
    def backward(ctx: Any, loss_gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        # Only now divided by the number of targets: float16 would not hold gradients so small.
        scale = loss_gradient / ctx.num_targets
        gradients = []
        for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            gradients.append((gradient * scale).to(dtype))
        return *gradients, None, None  # none for the targets and `counted`


def _by_blocks(
    latents: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, counted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Summed loss, hits, and the summed loss's gradients by latents, weight and bias."""
    rows = block_rows(latents, len(weight))
    latent_blocks = latents.split(rows)
    target_blocks = targets[:, None].split(rows)
    masks = [None] * len(latent_blocks)
    if counted is not None:
        masks = counted[:, None].split(rows)
    totals: list[Tensor] = []
    grad_latents = []
    for block, target, mask in zip(latent_blocks, target_blocks, masks, strict=True):
        grad_block, *sums = _of_block(block, weight, bias, target, mask)
        grad_latents.append(grad_block)
        if not totals:
            totals = sums
            continue
        for total, part in zip(totals, sums, strict=True):
            total.add_(part)
        del sums  # so that there are two gradients of the weight at most
    loss, hits, grad_weight, grad_bias = totals
    return loss, hits, torch.cat(grad_latents), grad_weight, grad_bias


def _of_block(
    block: Tensor, weight: Tensor, bias: Tensor, target: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradient by a block's latents; and of its rows summed loss, hits, gradients by weight and bias."""
    sum_type = sum_dtype(block.dtype)
    # The logits are gone before the gradients need as much memory.
    losses, is_hit, probabilities = block_loss(torch.addmm(bias, block, weight.t()).to(sum_type), target)
    if mask is not None:
        losses = losses.where(mask, 0)
        is_hit = is_hit & mask
    grad_logits = logit_gradients(probabilities, target, mask)
    grad_bias = grad_logits.sum(0)
    grad_logits = grad_logits.to(block.dtype)  # the precision of the products
    grad_weight = (grad_logits.t() @ block).to(sum_type)
    return grad_logits @ weight, losses.sum(), is_hit.sum(), grad_weight, grad_bias


def block_rows(latents: Tensor, vocab_size: int) -> int:
    """Rows of one block: as many as its logits have room for."""
    elements = BLOCK_ELEMENTS.get(latents.device.type, BLOCK_ELEMENTS_ELSEWHERE)
    rows = max(1, elements // vocab_size)
    return min(rows, FLOAT16_ROWS) if latents.dtype is torch.float16 else rows


def block_loss(
    logits: Float[Tensor, "target vocab"], target: Int64[Tensor, "target 1"]
) -> tuple[Float[Tensor, "target 1"], Bool[Tensor, "target 1"], Float[Tensor, "target vocab"]]:
    """Cross-entropies (nats), whether the largest logit is the target's, and the probabilities."""
    largest, argmax = logits.max(1, keepdim=True)  # R 1
    probabilities = logits.softmax(1)  # R V
    # log(sum(exp(logits))), by way of the largest probability, which is at least 1 / V.
    log_normaliser = largest - probabilities.gather(1, argmax).log()
    return log_normaliser - logits.gather(1, target), argmax == target, probabilities


def logit_gradients(
    probabilities: Float[Tensor, "target vocab"],
    target: Int64[Tensor, "target 1"],
    mask: Bool[Tensor, "target 1"] | None,
) -> Float[Tensor, "target vocab"]:
    """The summed loss's gradients by the logits, written over the probabilities: less 1 at the target."""
    minus_one = probabilities.new_full((1, 1), -1.0).expand_as(target)
    gradients = probabilities.scatter_add_(1, target, minus_one)
    return gradients if mask is None else gradients.mul_(mask)
