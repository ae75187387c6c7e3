"""Pictures of frozen features: patches as colours, the class token's attention, and nearest neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

CELL_INCHES = 0.85
LABEL_INCHES = 1.2
NAME_LENGTH = 18  # characters
SAME_CLASS, OTHER_CLASS = "#2f8f4e", "#d9722a"
Picture = UInt8[np.ndarray, "height width 3"]


def principal_colours(
    tokens: Float[Tensor, "image row column dim"],
) -> Float[np.ndarray, "image row column 3"]:
    """The first three principal components of some images' patch features, together, as red, green and blue.

    The lowest and highest hundredth of each component are cut off.
    """
    flat = tokens.flatten(0, 2).double()
    centred = flat - flat.mean(0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)  # in rising order
    directions = vectors[:, -3:].flip(1)
    # A direction and its opposite are equally good: all machines take that whose largest entry is positive.
    largest = directions.abs().argmax(0)
    directions = directions * directions.gather(0, largest[None]).sign()
    components = centred @ directions
    low, high = (components.quantile(part, dim=0) for part in (0.01, 0.99))
    colours = ((components - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    if colours.shape[1] < 3:  # features of fewer dimensions
        colours = F.pad(colours, (0, 3 - colours.shape[1]))
    return colours.unflatten(0, tokens.shape[:3]).numpy()


class LastAttention(TorchFunctionMode):
    """Remembers the last attention of a forward pass, whichever library's network computes it.

    It sees calls of PyTorch's `scaled_dot_product_attention`, which MMPretrain's, timm's and Hugging Face's
    ViTs make.

    Examples:
        >>> tokens = torch.ones(1, 1, 5, 4)  # image head token dim; four patches behind the class token
        >>> with LastAttention() as last:
        ...     _ = F.scaled_dot_product_attention(tokens, tokens, tokens)
        >>> last.of_class_token(grid=(2, 2))
        tensor([[[0.2000, 0.2000],
                 [0.2000, 0.2000]]])
    """

    ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

    def __init__(self) -> None:
        super().__init__()
        self.call: dict[str, Any] | None = None

    def __torch_function__(
        self, function: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call a function of PyTorch."""
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            self.call = {**dict(zip(self.ARGUMENTS, args, strict=False)), **kwargs}
        return function(*args, **kwargs)

    def of_class_token(self, grid: tuple[int, int]) -> Float[Tensor, "image row column"] | None:
        """Each patch's share of the class token's attention, mean over heads; None if no call was seen.

        Args:
            grid: of the patches, which are the last tokens.
        """
        if self.call is None:
            return None
        query = self.call["query"][..., :1, :].float().cpu()
        keys = self.call["key"].float().cpu()  # image head token dim
        mask = self.call.get("attn_mask")
        if mask is not None:
            mask = mask[..., :1, :].cpu()
            mask = mask if mask.dtype == torch.bool else mask.float()
        # The weights themselves are what attention gives of values that are ones on the diagonal.
        one_hot = torch.eye(keys.shape[-2]).expand(*keys.shape[:-2], -1, -1)
        weights = F.scaled_dot_product_attention(
            query, keys, one_hot, attn_mask=mask, scale=self.call.get("scale")
        )
        shares = weights.mean(1)[:, 0]  # image token
        return shares[:, -math.prod(grid) :].unflatten(1, grid)


def patches_figure(
    pictures: Sequence[Picture], shown: Mapping[str, Shaped[np.ndarray, "image ..."]]
) -> Figure:
    """A column for each picture: itself, then its patches as each model sees them.

    Args:
        pictures: the images.
        shown: by the model's name, `(image, row, column, 3)` of `principal_colours`, or one number a patch,
            `(image, row, column)`, whose lowest in an image is black and whose highest is yellow.
    """
    figure, cells = _grid(1 + len(shown), len(pictures))
    _name(cells[0, 0], "image")
    for axes, picture in zip(cells[0], pictures, strict=True):
        axes.imshow(picture)
    for line, (name, images) in zip(cells[1:], shown.items(), strict=True):
        _name(line[0], name)
        for axes, image in zip(line, images, strict=True):
            axes.imshow(image, cmap="inferno", interpolation="nearest")
    return figure


def nearest_images(
    queries: Float[Tensor, "query dim"], known: Float[Tensor, "image dim"], count: int, itself: bool = False
) -> tuple[Int64[Tensor, "query count"], Float[Tensor, "query count"]]:
    """The images with the highest cosine, and these.

    Args:
        queries, known: features.
        count: number of neighbours.
        itself: True if the queries are among the known images: then the first neighbour is left out.
    """
    cosines = F.normalize(queries, dim=1) @ F.normalize(known, dim=1).T
    first = int(itself)
    values, images = cosines.topk(min(count + first, len(known)), dim=1)
    return images[:, first:], values[:, first:]


def neighbours_figure(
    queries: Sequence[Picture],
    neighbours: Sequence[Sequence[Picture]],
    cosines: Float[Tensor, "query count"],
    same_class: Sequence[Sequence[bool]] | None,
) -> Figure:
    """A line for each query: itself, and its neighbours with their cosines, framed by their class.

    Args:
        queries: the images.
        neighbours: pictures of each query's neighbours.
        cosines: of these.
        same_class: whether each has the query's class; None without classes.
    """
    figure, cells = _grid(len(queries), 1 + len(neighbours[0]), names=False)
    for line, query, pictures, values in zip(cells, queries, neighbours, cosines.tolist(), strict=True):
        line[0].imshow(query)
        for axes, picture, value in zip(line[1:], pictures, values, strict=True):
            axes.imshow(picture)
            axes.text(
                0.04,
                0.05,
                f"{value:.2f}",
                transform=axes.transAxes,
                fontsize=7,
                color="white",
                bbox=dict(facecolor="black", alpha=0.55, pad=1.2, linewidth=0),
            )
    for line, own in zip(cells, same_class or (), strict=False):
        for axes, is_same in zip(line[1:], own, strict=True):
            axes.set_frame_on(True)
            axes.spines[:].set(color=SAME_CLASS if is_same else OTHER_CLASS, linewidth=2.5)
    return figure


def _grid(num_lines: int, num_columns: int, names: bool = True) -> tuple[Figure, np.ndarray]:
    """Square cells without ticks, with room for names at the left."""
    left = LABEL_INCHES if names else 0.05
    width = left + num_columns * CELL_INCHES
    height = num_lines * CELL_INCHES
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(left / width, 0.01, 0.995, 0.99, wspace=0.06, hspace=0.06)
    cells = figure.subplots(num_lines, num_columns, squeeze=False)
    for axes in cells.flat:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_frame_on(False)
    return figure, cells


def _name(axes: Axes, name: str) -> None:
    """Write a line's name at its left; names are no formulas."""
    shown = name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…"
    axes.set_ylabel(shown, rotation=0, ha="right", va="center", fontsize=8, parse_math=False)
