"""Where the grid is in an encoder's output, found by showing it images that differ in one corner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor

from mapet_mm.utils.errors import UserError

# Ways to write the features of an image's positions, each taken to (B, N, D).
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "B N D": lambda output: output,
    "B D N": lambda output: output.transpose(1, 2),
    "N B D": lambda output: output.transpose(0, 1),
    "B D H W": lambda output: output.flatten(2).transpose(1, 2),
    "B H W D": lambda output: output.flatten(1, 2),
}
DRAWS, SEED = 4, 0
PROBES = 5  # of a draw: an image, and the same with each of its corners changed
# A changed corner's side, as a share of the image's, and its pixels: small beside any patch, and loud.
CORNER_SHARE, LOUDNESS = 32, 8.0


class GridError(UserError, ValueError):
    """An output without a grid of features; the message is one line."""


@dataclass(frozen=True)
class GridLayout:
    """The grid in an encoder's output.

    Args:
        form: a key of `FORMS`.
        first: how many tokens (class token, registers) come before the grid's.
        rows: of the grid.
        columns: of the grid.
        dim: feature channels.
    """

    form: str
    first: int
    rows: int
    columns: int
    dim: int

    def features(self, output: Tensor) -> Float[Tensor, "batch grid dim"]:
        """The grid's features (B, HW, D), in raster order."""
        return FORMS[self.form](output)[:, self.first : self.first + self.rows * self.columns]


@torch.no_grad()
def find_layout(encode: Callable[[Tensor], Tensor], size: int, device: torch.device | str) -> GridLayout:
    """Find the grid in what an encoder makes of square images.

    A corner of the image changes the features of the grid's corner there more than any other's; class token
    and registers notice all corners alike.

    Args:
        encode: from images (B, 3, H, W) to an output of any form.
        size: side of the images in pixels.
        device: of the encoder.

    Raises:
        GridError: the four corners of the image are not the four corners of a grid.
    """
    outputs = [encode(_probes(size, SEED + draw).to(device)) for draw in range(DRAWS)]
    shape = tuple(outputs[0].shape)
    forms = [form for form in FORMS if len(form.split()) == len(shape)]
    whole = shape[0] == PROBES  # else the first dimension is not the images': of windows, for example
    if len(shape) == 4 and whole:  # a map of a square image, square in one way: no need to look at corners
        sides = {"B D H W": shape[2:], "B H W D": shape[1:3]}
        square = [form for form in forms if sides[form][0] == sides[form][1]]
        if len(square) == 1:
            tokens = FORMS[square[0]](outputs[0])
            return GridLayout(square[0], 0, *sides[square[0]], tokens.shape[2])
    for form in forms:
        tokens = [FORMS[form](output) for output in outputs]
        if len(tokens[0]) != PROBES or tokens[0].shape[1] < 4:
            continue
        first, right, below, last = _corners(tokens)
        columns, count = right - first + 1, last - first + 1
        if columns > 1 and count % columns == 0 and below == last - columns + 1 > first:
            return GridLayout(form, first, count // columns, columns, tokens[0].shape[2])
    batch = "B" if whole else f"{shape[0]} of {PROBES} images"
    raise GridError(f"no grid of features in an output of shape {(batch, *shape[1:])}")


def _probes(size: int, seed: int) -> Float[Tensor, "5 3 height width"]:
    """Noise, and the same noise with another upper left, upper right, lower left and lower right corner."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(3, size, size, generator=generator).repeat(PROBES, 1, 1, 1)
    side = max(1, size // CORNER_SHARE)
    ends = slice(None, side), slice(size - side, None)
    for image, (rows, columns) in zip(images[1:], product(ends, ends), strict=True):
        image[:, rows, columns] = torch.randn(3, side, side, generator=generator).sign() * LOUDNESS
    return images


def _corners(draws: list[Float[Tensor, "5 token dim"]]) -> list[int]:
    """The token that notices each corner, and not the others, most."""
    change = torch.zeros(4, draws[0].shape[1])
    for plain, *changed in draws:
        norms = plain.norm(dim=-1)
        scale = (norms + norms.mean()).clamp_min(torch.finfo(torch.float32).tiny)
        change += (torch.stack(changed) - plain).norm(dim=-1).div(scale).cpu()  # corner token
    return (change - change.mean(dim=0)).argmax(dim=1).tolist()
