"""Draw the objectives' attention masks (which token sees which), from the code that training uses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from mapet_mm.models.utils.objectives import OBJECTIVES, Objective, group_sizes, visibility

GROUPS = "CMTQ"
GROUP_COLOURS = {"C": "#4c78a8", "M": "#e8963c", "T": "#4f9d5d", "Q": "#8a63c9"}
GROUP_NAMES = {"C": "context", "M": "mask tokens", "T": "targets' content", "Q": "query stream"}
TITLES = {"mapet": "MaPeT", "pim": "PIM", "mim": "MIM"}
UNSEEN_COLOUR = "#f1f1f4"
CELL_INCHES = 0.27


def mask_codes(objective: Objective, num_context: int, num_targets: int) -> Int[np.ndarray, "rows keys"]:
    """`visibility` as colour codes: 0 if a row does not see a key, else 1 + the key's group in "CMTQ".

    Args:
        objective: the objective.
        num_context: the cutting point `c`; counts the class token.
        num_targets: number of targets `n`.
    """
    sizes = group_sizes(objective.key_groups, num_context, num_targets)
    codes = np.repeat([1 + GROUPS.index(group) for group in objective.key_groups], sizes)
    return visibility(objective, num_context, num_targets).numpy() * codes


def draw_attention_mask(axes: Axes, objective: Objective, num_context: int, num_targets: int) -> None:
    """Draw one objective's mask: a cell per (row, key), in the colour of the key's group if the row sees it.

    Args:
        axes: to draw on.
        objective: the objective.
        num_context: the cutting point `c`; counts the class token.
        num_targets: number of targets `n`.
    """
    codes = mask_codes(objective, num_context, num_targets)
    colours = ListedColormap([UNSEEN_COLOUR, *GROUP_COLOURS.values()])
    axes.imshow(codes, cmap=colours, vmin=0, vmax=len(GROUPS), interpolation="nearest")
    axes.set_title(TITLES.get(objective.name, objective.name), fontsize=11, fontweight="bold", pad=26)
    axes.set(xticks=[], yticks=[])
    axes.set_xticks(np.arange(codes.shape[1] + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(codes.shape[0] + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.2)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    text = {"fontsize": 11, "fontweight": "bold"}
    for groups, is_key in ((objective.key_groups, True), (objective.groups, False)):
        sizes = np.array(group_sizes(groups, num_context, num_targets))
        for edge in np.cumsum(sizes)[:-1]:
            (axes.axvline if is_key else axes.axhline)(edge - 0.5, color="#333333", linewidth=1)
        for group, middle in zip(groups, np.cumsum(sizes) - sizes / 2 - 0.5, strict=True):
            colour = GROUP_COLOURS[group]
            if is_key:
                axes.text(middle, -0.9, group, ha="center", va="bottom", color=colour, **text)
            else:
                axes.text(-1.0, middle, group, ha="right", va="center", color=colour, **text)


def attention_mask_figure(
    objectives: Sequence[Objective] = tuple(OBJECTIVES.values()), num_context: int = 3, num_targets: int = 4
) -> Figure:
    """Draw the masks of several objectives side by side, with cells of the same size.

    Args:
        objectives: the objectives, left to right; all of them by default.
        num_context: the cutting point `c`; counts the class token.
        num_targets: number of targets `n`.
    """
    shapes = [mask_codes(one, num_context, num_targets).shape for one in objectives]
    # Margins in cells: above for title and key groups, left for row groups, right as a gap.
    above, beside, gap = 2.7, 1.8, 0.8
    width = sum(keys + beside + gap for _, keys in shapes)
    height = max(rows for rows, _ in shapes) + above + gap
    figure = Figure(figsize=(width * CELL_INCHES, height * CELL_INCHES))
    left = 0.0
    for objective, (rows, keys) in zip(objectives, shapes, strict=True):
        place = ((left + beside) / width, 1 - (above + rows) / height, keys / width, rows / height)
        draw_attention_mask(figure.add_axes(place), objective, num_context, num_targets)
        left += keys + beside + gap
    return figure
