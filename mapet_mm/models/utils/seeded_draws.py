"""Random numbers that depend on a seed alone: the same on every device, in whatever batch a seed comes."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

# SplitMix64's constants, as the signed numbers that a tensor holds.
GAMMA = 0x9E3779B97F4A7C15 - 2**64
FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
SECOND_FACTOR = 0x94D049BB133111EB - 2**64
MANTISSA_BITS = 53


def seeded_bits(seeds: Int64[Tensor, " batch"], count: int, stream: int = 0) -> Int64[Tensor, "batch draw"]:
    """`count` numbers of 64 random bits for each seed, `(B, count)` (SplitMix64).

    Args:
        seeds: `(B,)` int64.
        count: numbers for each seed.
        stream: another one gives other numbers for the same seeds; 0 takes the seeds as they are.
    """
    if stream:
        seeds = _mix(seeds ^ (stream * GAMMA))
    steps = torch.arange(1, count + 1, device=seeds.device)
    return _mix(seeds[:, None] + steps * GAMMA)  # modulo 2^64


def seeded_uniform(
    seeds: Int64[Tensor, " batch"], count: int, stream: int = 0
) -> Float[Tensor, "batch draw"]:
    """`count` float64 numbers from 0 to below 1 for each seed, `(B, count)`; see `seeded_bits`."""
    bits = _shift_right(seeded_bits(seeds, count, stream), 64 - MANTISSA_BITS)
    return bits.double() * 2.0**-MANTISSA_BITS


def _mix(keys: Tensor) -> Tensor:
    keys = (keys ^ _shift_right(keys, 30)) * FIRST_FACTOR
    keys = (keys ^ _shift_right(keys, 27)) * SECOND_FACTOR
    return keys ^ _shift_right(keys, 31)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Shift numbers as if they had no sign: zeros come in from the left."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
