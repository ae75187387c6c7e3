"""Times of the choices inside a pre-training step and their alternatives: attention, head loss, AdamW.

Attention is that of the rows T and Q with their mask in one layer, and the head's loss is over a batch's
targets, both forward and backward. Rounds are interleaved, and times are medians.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from harness import DEVICE, ON_GPU, machine, parse_options, report, time_in_turns
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from mapet_mm.models.losses import linear_cross_entropy as losses
from mapet_mm.models.utils.attention import attend_by_products
from mapet_mm.models.utils.objectives import MAPET, visibility

MODELS = {"tiny": (3, 50), "small": (6, 50), "base": (12, 60)}  # heads, cutting point
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CUDA_KERNELS = {
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}
WARM_UP = 2
VOCAB = 8192
FAILED: list[str] = []  # alternatives that stopped with an error, which costs no other its time


def milliseconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, str]:
    """Median time of each call, in turns; a dash if the device does not support it, or if it fails."""
    able = {name: call for name, call in calls.items() if runs(name, call)}
    taken = time_in_turns(able, rounds, WARM_UP)
    return {name: f"{1000 * statistics.median(taken[name]):.1f}" if name in taken else "–" for name in calls}


def runs(name: str, call: Callable[[], object]) -> bool:
    try:
        call()
    except Exception as error:
        if not isinstance(error, RuntimeError) or "kernel" not in str(error):
            FAILED.append(f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return False
    return True


def backward(output: Tensor) -> None:
    output.backward(torch.ones_like(output))


def attention_calls(size: str, dtype: torch.dtype, device: str, batch: int) -> dict[str, Callable[[], None]]:
    """Each kernel's forward and backward pass for T and Q."""
    heads, context = MODELS[size]
    num_targets = 197 - context
    sees = visibility(MAPET, context, num_targets)[context + num_targets :].to(device)
    bias = torch.zeros(sees.shape, device=device, dtype=dtype).masked_fill(~sees, float("-inf"))
    queries, keys, values = (
        torch.randn(batch, rows, heads, 64, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for rows in (sees.shape[0], sees.shape[1], sees.shape[1])
    )

    def fused(backend: SDPBackend | None = None) -> None:
        with sdpa_kernel([backend]) if backend else nullcontext():
            backward(F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias))

    def products() -> None:
        backward(attend_by_products(queries, keys, values, bias))

    calls = {"fused": fused, "products": products}
    if device != "cuda":  # elsewhere flex attention has no backward pass, and there is one backend
        return calls
    blocks = create_block_mask(lambda batch, head, row, key: sees[row, key], None, None, *sees.shape, device)
    compiled = torch.compile(flex_attention)

    def flexible() -> None:
        backward(compiled(queries, keys, values, block_mask=blocks))

    backends = {f"fused, {name}": partial(fused, kind) for name, kind in CUDA_KERNELS.items()}
    return {**calls, **backends, "flex, compiled": flexible}


def head_calls(size: str, dtype: torch.dtype, device: str, batch: int) -> dict[str, Callable[[], None]]:
    """The loss with PyTorch's linear layer and cross-entropy, and in blocks of several sizes."""
    heads, context = MODELS[size]
    targets = torch.randint(VOCAB, (batch * (197 - context),), device=device)
    latents = torch.randn(len(targets), 64 * heads, device=device, requires_grad=True)
    linear = nn.Linear(64 * heads, VOCAB, device=device)

    def whole() -> None:
        with torch.autocast(device, dtype, enabled=dtype is not torch.float32):
            loss = F.cross_entropy(linear(latents), targets)
        loss.backward()

    def blocks(rows: int) -> None:
        before = losses.BLOCK_ELEMENTS
        losses.BLOCK_ELEMENTS = {device: rows * VOCAB}
        with torch.autocast(device, dtype, enabled=dtype is not torch.float32):
            loss, _ = losses.linear_cross_entropy(latents, linear.weight, linear.bias, targets)
        loss.backward()
        losses.BLOCK_ELEMENTS = before

    sizes = (1024, 4096, 8192) if device == "cuda" else (64, 256, 1024)
    return {"linear, cross-entropy": whole, **{f"blocks of {rows}": partial(blocks, rows) for rows in sizes}}


def adamw_calls(size: str, device: str) -> dict[str, Callable[[], None]]:
    """One step over as many parameters as twelve layers of the ViT have in their matrices."""
    dim = 64 * MODELS[size][0]
    calls = {}
    for name, options in {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}.items():
        parameters = [
            torch.zeros(width * dim, dim, device=device).requires_grad_()
            for _ in range(12)
            for width in (3, 1, 4, 4)
        ]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        calls[name] = torch.optim.AdamW(parameters, **options).step
    return calls


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print three tables."""
    args = parse_options(
        __doc__,
        arguments,
        sizes=(list(MODELS), MODELS),
        batch=64 if ON_GPU else 8,
        rounds=20 if ON_GPU else 7,
    )
    print(f"batch {args.batch}; {machine()}")
    for title, make in (("Attention of T and Q", attention_calls), ("The head's loss", head_calls)):
        cases = {
            f"ViT-{size}, {precision}": make(size, dtype, DEVICE, args.batch)
            for size in args.sizes
            for precision, dtype in DTYPES.items()
        }
        print_times(title, cases, args.rounds)
    print_times("AdamW", {f"ViT-{size}": adamw_calls(size, DEVICE) for size in args.sizes}, args.rounds)
    if FAILED:
        sys.exit("error: without a time: " + "; ".join(dict.fromkeys(FAILED)))


def print_times(title: str, cases: dict[str, dict[str, Callable[[], object]]], rounds: int) -> None:
    """Print a row for each case and a column for each alternative."""
    measured = {case: milliseconds(calls, rounds) for case, calls in cases.items()}
    names = list(dict.fromkeys(name for times in measured.values() for name in times))
    rows = [[case, *(times.get(name, "") for name in names)] for case, times in measured.items()]
    report(f"{title}, ms", ["", *names], rows)


if __name__ == "__main__":
    main()
