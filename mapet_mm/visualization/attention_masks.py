"""Draw the objectives' attention masks (which token sees which), from the code that training uses.

`python -m mapet_mm.visualization.attention_masks FILE` draws all three side by side.
"""

from __future__ import annotations

import sys

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from mapet_mm.models.utils.objectives import MAPET, MIM, OBJECTIVES, PIM, Objective, group_sizes, visibility
from mapet_mm.visualization.report import Section

GROUPS = "CMTQ"
GROUP_COLOURS = {"C": "#4c78a8", "M": "#e8963c", "T": "#4f9d5d", "Q": "#8a63c9"}
GROUP_NAMES = {"C": "context", "M": "mask tokens", "T": "targets' content", "Q": "query stream"}
TITLES = {"mapet": "MaPeT", "pim": "PIM", "mim": "MIM"}
UNSEEN_COLOUR = "#f1f1f4"
CELL_INCHES = 0.27
# Margins in cells: above for title and key groups, left for row groups, right and below.
ABOVE, BESIDE, GAP = 2.7, 1.8, 0.8


def attention_mask_figure(objective: Objective, num_context: int = 3, num_targets: int = 4) -> Figure:
    """Draw one objective's mask: a cell per (row, key), in the colour of the key's group if the row sees it.

    Args:
        objective: the objective.
        num_context: the cutting point `c`; counts the class token.
        num_targets: number of targets `n`.
    """
    keys, rows = mask_shape(objective, num_context, num_targets)
    width, height = keys + BESIDE + GAP, rows + ABOVE + GAP
    figure = Figure(figsize=(width * CELL_INCHES, height * CELL_INCHES))
    axes = figure.add_axes((BESIDE / width, GAP / height, keys / width, rows / height))
    draw_mask(axes, objective, num_context, num_targets, fontsize=11)
    return figure


def all_masks_figure(num_context: int = 3, num_targets: int = 4) -> Figure:
    """Draw the masks of all objectives side by side, with a key to the groups below; arguments as above."""
    objectives = [MIM, PIM, MAPET]
    shapes = [mask_shape(objective, num_context, num_targets) for objective in objectives]
    width = sum(keys + BESIDE + GAP for keys, _ in shapes)
    above = ABOVE + 0.6  # its letters are larger
    height = max(rows for _, rows in shapes) + above + 2 * GAP
    figure = Figure(figsize=(width * CELL_INCHES, height * CELL_INCHES))
    left = 0.0
    for objective, (keys, rows) in zip(objectives, shapes, strict=True):
        left += BESIDE
        bottom = height - above - rows
        axes = figure.add_axes((left / width, bottom / height, keys / width, rows / height))
        draw_mask(axes, objective, num_context, num_targets, fontsize=15)
        left += keys + GAP
    # The key has its place below the smallest mask, the first one.
    for line, (group, name) in enumerate(GROUP_NAMES.items()):
        place = ((BESIDE - 1) / width, (GAP + 1.2 * (3 - line)) / height)
        figure.text(*place, f"{group}  {name}", color=GROUP_COLOURS[group], fontsize=14)
    return figure


def mask_shape(objective: Objective, num_context: int, num_targets: int) -> tuple[int, int]:
    """Number of keys and of rows."""
    keys = sum(group_sizes(objective.key_groups, num_context, num_targets))
    rows = sum(group_sizes(objective.groups, num_context, num_targets))
    return keys, rows


def draw_mask(axes: Axes, objective: Objective, num_context: int, num_targets: int, fontsize: int) -> None:
    """Draw one objective's mask, its name and the names of its groups."""
    sizes = group_sizes(objective.key_groups, num_context, num_targets)
    codes = np.repeat([1 + GROUPS.index(group) for group in objective.key_groups], sizes)
    codes = visibility(objective, num_context, num_targets).numpy() * codes  # 0: not seen
    rows, keys = codes.shape
    colours = ListedColormap([UNSEEN_COLOUR, *GROUP_COLOURS.values()])
    axes.imshow(codes, cmap=colours, vmin=0, vmax=len(GROUPS), interpolation="nearest")
    name = TITLES.get(objective.name, objective.name)
    axes.set_title(name, fontsize=fontsize, fontweight="bold", pad=2.4 * fontsize)
    axes.set(xticks=[], yticks=[])
    axes.set_xticks(np.arange(keys + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.2)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    for groups, is_key in ((objective.key_groups, True), (objective.groups, False)):
        sizes = np.array(group_sizes(groups, num_context, num_targets))
        for edge in np.cumsum(sizes)[:-1]:
            (axes.axvline if is_key else axes.axhline)(edge - 0.5, color="#333333", linewidth=1)
        for group, middle in zip(groups, np.cumsum(sizes) - sizes / 2 - 0.5, strict=True):
            place = (middle, -0.9) if is_key else (-1.0, middle)
            side = dict(ha="center", va="bottom") if is_key else dict(ha="right", va="center")
            axes.text(*place, group, color=GROUP_COLOURS[group], fontsize=fontsize, fontweight="bold", **side)


def masks_section() -> Section:
    """The attention masks of all objectives."""
    groups = ", ".join(f"{group} {name}" for group, name in GROUP_NAMES.items())
    caption = (
        "Rows attend to columns; a coloured cell is one that is seen. Drawn from the function that builds "
        f"the masks of the model, with 3 context tokens and 4 targets. {groups}; nobody attends to Q."
    )
    return Section("Who sees whom", caption, [attention_mask_figure(one) for one in OBJECTIVES.values()])


if __name__ == "__main__":
    all_masks_figure().savefig(sys.argv[1], dpi=120)
