"""SplitMix64: a random number for each index of a seed, in any order, the same on every device.

Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from jaxtyping import Float, Int64
from torch import Tensor

DRAW_SEED = "draw_seed"  # in an image's data sample: the seed of its random draws
GAMMA = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
MASK = 2**64 - 1
MANTISSA_BITS = 24  # of float32, which all devices have


def splitmix(seed: int, index: int) -> int:
    """The number, below 2^64, of an index from 1."""
    mixed = (seed + index * GAMMA) & MASK
    for shift, factor in zip(SHIFTS[:2], FACTORS, strict=True):
        mixed = (mixed ^ mixed >> shift) * factor & MASK
    return mixed ^ mixed >> SHIFTS[2]


def splitmix_of_tensor(seeds: Int64[Tensor, " *seeds"], indices: Int64[Tensor, " *indices"]) -> Tensor:
    """The numbers of indices from 1, as the signed ones that a tensor holds; both tensors are broadcast."""
    mixed = seeds + indices * _signed(GAMMA)  # modulo 2^64
    for shift, factor in zip(SHIFTS[:2], FACTORS, strict=True):
        mixed = (mixed ^ _shift_right(mixed, shift)) * _signed(factor)
    return mixed ^ _shift_right(mixed, SHIFTS[2])


def uniform_of_tensor(
    seeds: Int64[Tensor, " *seeds"], indices: Int64[Tensor, " *indices"]
) -> Float[Tensor, " *numbers"]:
    """The numbers of indices from 1 as float32 from 0 to below 1; both tensors are broadcast."""
    bits = _shift_right(splitmix_of_tensor(seeds, indices), 64 - MANTISSA_BITS)
    return bits.float() * 2.0**-MANTISSA_BITS


def _signed(number: int) -> int:
    return number - 2**64


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Shift numbers as if they had no sign: zeros come in from the left."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
