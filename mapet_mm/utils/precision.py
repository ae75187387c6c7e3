"""The precision in which something is computed: autocast, products and sums, and frozen networks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor


def product_seconds(dtype: torch.dtype) -> float:
    """How long the CPU takes for a product of two matrices of 512 x 512, at best."""
    matrix = torch.ones(512, 512, dtype=dtype)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - start)
    return min(times)


def choose_dtype(device_type: str) -> torch.dtype:
    """The dtype of autocast on a device: bfloat16 where it is fast, else float16, on CPUs float32."""
    if device_type == "cpu":
        # Timed, because no instruction set tells: a product in bfloat16 took 1.9 times as long as in float32
        # on a CPU with instructions for it, but without AMX, and 30 times as long on one without AVX-512.
        is_faster = product_seconds(torch.bfloat16) < 0.8 * product_seconds(torch.float32)
        return torch.bfloat16 if is_faster else torch.float32
    # Emulated bfloat16 (before Ampere) is slower than float16 and counts as not supported.
    is_native = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if is_native else torch.float16


def product_dtype(operand: Tensor) -> torch.dtype:
    """Data type in which autocast multiplies an operand; its own type without autocast."""
    device = operand.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else operand.dtype


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Data type of softmax and sums over products of `dtype`: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


# What a frozen network can compute in; its weights stay in float32.
PRECISIONS = ("float32", "tf32", "float16", "bfloat16")
HALF = ("float16", "bfloat16")

# PyTorch's switches for matrix products and convolutions below float32 precision. The new ones are used where
# they exist: once one of them has been set, reading an old one raises an error.
if hasattr(torch.backends.cudnn, "conv"):
    _SWITCH, _FULL, _TF32 = "fp32_precision", "ieee", "tf32"
    _BACKENDS: tuple[Any, ...] = (
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,
        torch.backends.mkldnn.matmul,
        torch.backends.mkldnn.conv,
    )
else:
    _SWITCH, _FULL, _TF32 = "allow_tf32", False, True
    _BACKENDS = (torch.backends.cuda.matmul, torch.backends.cudnn)


@contextmanager
def computing_in(precision: str, device: torch.device) -> Iterator[None]:
    """Compute in one of `PRECISIONS`, whatever the caller's autocast and switches are.

    float16 and bfloat16 are autocast's: products and convolutions in that type, LayerNorm and softmax in
    float32. A CLIP ResNet gives the same features, bit for bit, as with weights converted to that type. tf32
    lets a GPU round the operands of products to 10 bits; on a CPU it is float32.
    """
    before = [getattr(backend, _SWITCH) for backend in _BACKENDS]
    for backend in _BACKENDS:
        setattr(backend, _SWITCH, _TF32 if precision == "tf32" else _FULL)
    is_half = precision in HALF
    dtype = getattr(torch, precision) if is_half else None
    try:
        with torch.autocast(device.type, dtype=dtype, enabled=is_half):
            yield
    finally:
        for backend, value in zip(_BACKENDS, before, strict=True):
            setattr(backend, _SWITCH, value)


def full_float32(device: torch.device) -> AbstractContextManager[None]:
    """Compute in true float32, without autocast or TF32, so an image gets the same tokens on any device."""
    return computing_in("float32", device)
