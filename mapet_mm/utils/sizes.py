"""Sizes of images, patches and grids as configs give them."""

import operator
from collections.abc import Iterable
from typing import SupportsIndex


def pair(option: str, size: SupportsIndex | Iterable[SupportsIndex]) -> tuple[int, int]:
    """(height, width) of one number or two, of any whole type.

    Args:
        option: names the size in the error.
        size: one number for both sides, or (height, width).

    Raises:
        ValueError: the size is not one or two whole numbers above 0.
    """
    try:
        sides = tuple(map(operator.index, size if isinstance(size, Iterable) else (size, size)))
    except TypeError:
        sides = ()
    sides = sides * 2 if len(sides) == 1 else sides
    if len(sides) != 2 or min(sides) < 1:
        raise ValueError(f"{option}={size!r}: one whole number above 0, or two, (height, width)")
    return sides


def square(option: str, size: SupportsIndex | Iterable[SupportsIndex]) -> int:
    """The side of a tokenizer's images, which are square.

    Args:
        option: names the size in the error.
        size: one number, or the same one twice.

    Raises:
        ValueError: the size is no whole number above 0, or two that differ.
    """
    height, width = pair(option, size)
    if height != width:
        raise ValueError(
            f"{option}={size!r}: a tokenizer takes square images; for oblong ones fill a token store with a "
            'program of your own (docs/tutorials/new_tokenizer.md, "Tokens from elsewhere")'
        )
    return height
