"""Linear layer and cross-entropy in one, without ever holding the logits of a whole batch."""

from itertools import repeat
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mapet_mm.utils.precision import product_dtype, sum_dtype

# Rows times classes of one block: 8 MiB in float32 on CPU (measured, docs/performance.md); on a GPU larger,
# so that its products stay large.
BLOCK_ELEMENTS = {"cpu": 2**21}
BLOCK_ELEMENTS_ELSEWHERE = 2**26
# A block's gradient is summed before it is divided by the number of targets: in float16 over so many at most.
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
    products run in its precision, and softmax and sums in float32 (`sum_dtype`), as PyTorch's own would. All
    targets count if `counted` is None.
    """
    # Inside, gradients are always off.
    with_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (latents, weight, bias))
    return _LinearCrossEntropy.apply(latents, weight, bias, targets, counted, with_gradients)


def cross_entropy(
    logits: Float[Tensor, "target vocab"],
    targets: Int64[Tensor, " target"],
    counted: Bool[Tensor, " target"] | None = None,
) -> tuple[Float[Tensor, ""], Int64[Tensor, ""]]:
    """`linear_cross_entropy` from the logits `(R, V)` of a head with more than a linear layer."""
    losses = F.cross_entropy(logits.to(sum_dtype(logits.dtype)), targets, reduction="none")
    where = logits.detach().argmax(1)
    hits = where == targets
    if counted is None:
        return losses.mean(), hits.sum()
    return losses.where(counted, 0).sum() / counted.sum(), (hits & counted).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        latents, weight, bias, targets, counted, with_gradients = arguments
        device = latents.device.type
        dtype = product_dtype(latents)
        operands = (operand.to(dtype) for operand in (latents, weight, bias))
        with torch.autocast(device, enabled=False):
            loss, hits, gradients = _by_blocks(*operands, targets, counted, with_gradients)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(hits)
        ctx.num_targets = len(targets) if counted is None else counted.sum()
        ctx.dtypes = latents.dtype, weight.dtype, bias.dtype
        return loss / ctx.num_targets, hits

    @staticmethod
    @once_differentiable  # a second derivative would take the stored gradients for constants
    def backward(ctx: Any, loss_gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        # Only now divided by the number of targets: float16 would not hold gradients so small.
        scale = loss_gradient / ctx.num_targets
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *((gradient * scale).to(dtype) for gradient, dtype in gradients), *[None] * 3


def _by_blocks(
    latents: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    counted: Tensor | None,
    with_gradients: bool,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Summed loss, hits, and the summed loss's gradients by latents, weight and bias (empty if not asked)."""
    elements = BLOCK_ELEMENTS.get(latents.device.type, BLOCK_ELEMENTS_ELSEWHERE)
    rows = max(1, elements // len(weight))
    if latents.dtype is torch.float16:
        rows = min(rows, FLOAT16_ROWS)
    wide = sum_dtype(latents.dtype)
    loss = torch.zeros((), device=latents.device, dtype=wide)
    hits = torch.zeros((), dtype=torch.int64, device=latents.device)
    by_latents: list[Tensor] = []
    by_weight = by_bias = None
    blocks = [latents.split(rows), targets[:, None].split(rows)]
    blocks.append(repeat(None, len(blocks[0])) if counted is None else counted[:, None].split(rows))
    for block, target, counts in zip(*blocks, strict=True):
        logits = torch.addmm(bias, block, weight.t()).to(wide)  # R V
        largest, where = logits.max(1, keepdim=True)
        at_target = logits.gather(1, target)
        probabilities = logits.softmax(1)
        # log(sum(exp(logits))), by way of the largest probability, which is at least 1 / V.
        log_normaliser = largest - probabilities.gather(1, where).log()
        losses, hit = log_normaliser - at_target, where == target
        if counts is not None:
            losses, hit = losses.where(counts, 0), hit & counts
        loss, hits = loss + losses.sum(), hits + hit.sum()
        if with_gradients:
            minus_one = probabilities.new_full((1, 1), -1.0).expand_as(target)
            by_logits = probabilities.scatter_add_(1, target, minus_one)
            if counts is not None:
                by_logits.mul_(counts)
            block_by_bias = by_logits.sum(0)
            by_logits = by_logits.to(latents.dtype)
            by_latents.append(by_logits @ weight)
            block_by_weight = (by_logits.t() @ block).to(wide)
            by_bias = block_by_bias if by_bias is None else by_bias + block_by_bias
            by_weight = block_by_weight if by_weight is None else by_weight.add_(block_by_weight)
    return loss, hits, (torch.cat(by_latents), by_weight, by_bias) if with_gradients else ()
