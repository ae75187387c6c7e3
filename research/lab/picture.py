"""Filled tables as one picture: for each column dots with error bars, or quality over compute."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import LogLocator, NullFormatter

from lab.render import Grid, Measured
from lab.tables import Column, Table
from mapet_mm.utils.errors import UserError

TERAFLOPS = "pre-training/teraflops"
PANELS_ABREAST = 4
COLOUR, BASELINE_COLOUR, MISSING_COLOUR = "#1f6fb4", "#d1602c", "#8a8a94"
MARKERS = "osD^vP*X"


def draw_tables(filled: Sequence[tuple[Table, Grid]]) -> Figure:
    """Draw tables, each with its cells, one below the other, and each column in a panel of its own.

    A table with a column of `pre-training/teraflops` is drawn as curves over it, all others as dots.
    """
    heights = []
    for table, _ in filled:
        each = 3.4 if _compute_column(table) else 1.0 + 0.24 * len(table.run_rows)
        heights.append(0.8 + each * math.ceil(len(_panels(table)) / PANELS_ABREAST))
    figure = Figure(figsize=(13, sum(heights)), layout="constrained", facecolor="white")
    bands = figure.subfigures(len(filled), 1, height_ratios=heights, squeeze=False)[:, 0]
    with rc_context({"text.parse_math": False}):  # a $ in a name is a $
        for band, (table, cells) in zip(bands, filled, strict=True):
            _draw_table(band, table, cells)
    return figure


def _compute_column(table: Table) -> Column | None:
    return next((column for column in table.columns if column.metric == TERAFLOPS), None)


def _panels(table: Table) -> list[Column]:
    """The columns to draw: over compute no other cost."""
    return [column for column in table.columns if not (column.is_cost and _compute_column(table))]


def _draw_table(band: SubFigure, table: Table, cells: Grid) -> None:
    panels, compute = _panels(table), _compute_column(table)
    down = math.ceil(len(panels) / PANELS_ABREAST)
    axes = band.subplots(down, math.ceil(len(panels) / down), squeeze=False, sharey=compute is None)
    handles: dict[str, object] = {}
    for panel, column in zip(axes.flat, panels, strict=False):
        if compute:
            handles |= _draw_curves(panel, table, column, compute, cells)
        else:
            _draw_dots(panel, table, column, cells)
        panel.set_title(column.heading, fontsize=9)
        panel.tick_params(labelsize=8)
        panel.grid(color="#e8e8ec")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in axes.flat[len(panels) :]:
        panel.set_visible(False)
    if compute and not handles:
        raise UserError(f"{table.title}: no row has both {compute.heading} and a result to draw over it")
    if handles:
        band.legend(handles.values(), handles, loc="outside right center", fontsize=8, frameon=False)
    drawn = [cells[row.name, column.heading] for row in table.run_rows for column in panels]
    missing = sum(isinstance(cell, str) and cell != "-" for cell in drawn)
    caption = "Mean over the seeds; bars: sample standard deviation."
    caption += f" Missing: {missing} of {len(drawn) - drawn.count('-')} cells." if missing else ""
    band.suptitle(table.title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    band.supxlabel(caption, fontsize=8, color="#55555e", x=0.01, ha="left")


def _draw_dots(panel: Axes, table: Table, column: Column, cells: Grid) -> None:
    """One line per row: mean, standard deviation and each seed; or why there is nothing."""
    for place, row in enumerate(table.run_rows):
        cell = cells[row.name, column.heading]
        if isinstance(cell, str):
            where = panel.get_yaxis_transform()
            panel.text(0.02, place, cell, transform=where, fontsize=7, va="center", color=MISSING_COLOUR)
            continue
        colour = BASELINE_COLOUR if row.name == table.baseline else COLOUR
        if cell.spread is not None:
            below = [place + 0.25] * len(cell.values)
            panel.plot(cell.values, below, ".", markersize=3, color=colour, alpha=0.5)
        panel.errorbar(cell.mean, place, xerr=cell.spread, fmt="o", markersize=5, capsize=2.5, color=colour)
    panel.set_yticks(range(len(table.run_rows)), [row.name for row in table.run_rows])
    panel.set_ylim(len(table.run_rows) - 0.5, -0.5)


def _draw_curves(
    panel: Axes, table: Table, column: Column, compute: Column, cells: Grid
) -> dict[str, object]:
    """One curve for the rows of one name, over the logarithm of the compute; returns handles by name."""
    names = list(dict.fromkeys(row.curve or row.name for row in table.run_rows))
    points: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    handles: dict[str, object] = {}
    for row in table.run_rows:
        cost, quality = cells[row.name, compute.heading], cells[row.name, column.heading]
        if isinstance(cost, Measured) and isinstance(quality, Measured):
            points[row.curve or row.name].append((cost.mean, quality.mean, quality.spread or 0.0))
    for number, name in enumerate(names):
        if points[name]:
            costs, means, spreads = zip(*sorted(points[name]), strict=True)
            style = dict(fmt=f"-{MARKERS[number % len(MARKERS)]}", color=f"C{number % 10}")
            handles[name] = panel.errorbar(costs, means, spreads, markersize=5, capsize=2.5, **style)
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel(compute.heading, fontsize=8)
    return handles
