"""Filled tables as one picture: of each column dots with error bars, or quality over compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from mapet_mm.experiments.compute import TERAFLOPS
from mapet_mm.experiments.render import Grid, Measured
from mapet_mm.experiments.table import Column, Row, TableDeclaration
from mapet_mm.visualization.curves import TRAIN_COLOUR, VAL_COLOUR

PANELS_ABREAST = 4
MISSING_COLOUR = "#8a8a94"
MARKERS = "osD^vP*X"


class Curve(NamedTuple):
    """What a legend names: the rows of one curve, or one row without compute."""

    name: str
    free: bool


Drawn = dict[Curve, Any]  # what stands for each curve in a panel; None where nothing is measured


def draw_tables(filled: Sequence[tuple[TableDeclaration, Grid]]) -> Figure:
    """Draw tables one below the other, each column in a panel of its own.

    A table with a column of `pre-training/teraflops` is drawn as curves over it, all others as dots. A row
    without pre-training has no place on that axis: it is a dashed line. What is
    missing is named in the picture.

    Args:
        filled: each table with its cells.
    """
    heights = [_height(table) for table, _ in filled]
    figure = Figure(figsize=(13, sum(heights)), layout="constrained", facecolor="white")
    bands = figure.subfigures(len(filled), 1, height_ratios=heights, squeeze=False)[:, 0]
    with rc_context({"text.parse_math": False}):  # a $ in a name is a $
        for band, (table, cells) in zip(bands, filled, strict=True):
            _draw_table(band, table, cells)
    return figure


def _height(table: TableDeclaration) -> float:
    """In inches: a heading, the rows of panels, and a line below."""
    each = 3.4 if _compute_column(table) else 1.0 + 0.24 * len(table.rows)
    return 0.8 + each * math.ceil(len(_panels(table)) / PANELS_ABREAST)


def _compute_column(table: TableDeclaration) -> Column | None:
    return next((column for column in table.columns if column.metric == TERAFLOPS), None)


def _panels(table: TableDeclaration) -> list[Column]:
    """The columns to draw: over compute no other cost."""
    return [column for column in table.columns if not (column.is_cost and _compute_column(table))]


def _draw_table(band: SubFigure, table: TableDeclaration, cells: Grid) -> None:
    panels, compute = _panels(table), _compute_column(table)
    down = math.ceil(len(panels) / PANELS_ABREAST)
    across = math.ceil(len(panels) / down)
    axes = band.subplots(down, across, squeeze=False, sharey=compute is None)
    drawn: list[Drawn] = []
    for panel, column in zip(axes.flat, panels, strict=False):
        if compute:
            drawn.append(_draw_curves(panel, table, column, compute, cells))
        else:
            _draw_dots(panel, table, column, cells)
        panel.set_title(f"{column.name} ({column.unit})", fontsize=9)
        panel.tick_params(labelsize=8)
        panel.grid(color="#e8e8ec")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in axes.flat[len(panels) :]:
        panel.set_visible(False)
    if compute:
        _name_curves(band, panels, drawn)
    band.suptitle(table.title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    band.supxlabel(_legend(table, panels, cells), fontsize=8, color="#55555e", x=0.01, ha="left")


def _draw_dots(panel: Axes, table: TableDeclaration, column: Column, cells: Grid) -> None:
    """One line per row: mean, standard deviation and each seed; or why there is nothing."""
    for place, row in enumerate(table.rows):
        cell = cells[row.name, column.heading]
        if isinstance(cell, str):
            where = panel.get_yaxis_transform()
            panel.text(0.02, place, cell, transform=where, fontsize=7, va="center", color=MISSING_COLOUR)
            continue
        colour = VAL_COLOUR if row.name == table.baseline else TRAIN_COLOUR
        if cell.spread is not None:
            below = [place + 0.25] * len(cell.values)
            panel.plot(cell.values, below, ".", markersize=3, color=colour, alpha=0.5)
        panel.errorbar(cell.mean, place, xerr=cell.spread, fmt="o", markersize=5, capsize=2.5, color=colour)
    panel.set_yticks(range(len(table.rows)), [row.name for row in table.rows])
    panel.set_ylim(len(table.rows) - 0.5, -0.5)
    if not any(isinstance(cells[row.name, column.heading], Measured) for row in table.rows):
        panel.set_xticks([])


def _draw_curves(panel: Axes, table: TableDeclaration, column: Column, compute: Column, cells: Grid) -> Drawn:
    """One curve for the rows of one name, over the logarithm of the compute.

    A row without compute has no place on the axis: it is a dashed line across it.
    """
    curves: dict[Curve, list[Row]] = {}
    for row in table.rows:
        cost = cells[row.name, compute.heading]
        free = isinstance(cost, Measured) and cost.mean == 0
        curves.setdefault(Curve(row.name if free else row.curve or row.name, free), []).append(row)
    drawn: Drawn = {}
    for (curve, rows), marker, number in zip(
        curves.items(), cycle(MARKERS), range(len(curves)), strict=False
    ):
        pairs = [(cells[row.name, compute.heading], cells[row.name, column.heading]) for row in rows]
        measured = [pair for pair in pairs if all(isinstance(cell, Measured) for cell in pair)]
        points = sorted(measured, key=lambda pair: (pair[0].mean, pair[1].mean))
        draw = _draw_level if curve.free else partial(_draw_curve, marker=marker)
        drawn[curve] = draw(panel, points, color=f"C{number % 10}") if points else None
    if not any(len(line.get_xdata()) for line in panel.lines):
        panel.set_yticks([])
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel(compute.heading, fontsize=8)
    return drawn


def _draw_curve(panel: Axes, points: Sequence[tuple[Measured, Measured]], marker: str, color: str) -> Any:
    """Quality over compute, with error bars."""
    return panel.errorbar(
        [cost.mean for cost, _ in points],
        [quality.mean for _, quality in points],
        yerr=[quality.spread or 0.0 for _, quality in points],
        fmt=f"-{marker}",
        markersize=5,
        linewidth=1.4,
        capsize=2.5,
        color=color,
    )


def _draw_level(panel: Axes, points: Sequence[tuple[Measured, Measured]], color: str) -> Line2D:
    """The quality of a row without compute, in a band of its standard deviation."""
    ((_, quality),) = points
    if quality.spread:
        panel.axhspan(
            quality.mean - quality.spread, quality.mean + quality.spread, color=color, alpha=0.15, lw=0
        )
    return panel.axhline(quality.mean, linestyle="--", linewidth=1.4, color=color)


def _name_curves(band: SubFigure, columns: Sequence[Column], drawn: Sequence[Drawn]) -> None:
    """One legend for all panels, which names the panels where a curve is missing."""
    handles, labels = [], []
    for curve in drawn[0]:
        there = [panel[curve] for panel in drawn if panel[curve] is not None]
        missing = [column.name for column, panel in zip(columns, drawn, strict=True) if panel[curve] is None]
        handles.append(there[0] if there else Line2D([], [], linestyle=""))
        label = f"{curve.name} (missing)" if not there else f"{curve.name} (missing in {', '.join(missing)})"
        labels.append(label if missing else curve.name)
    band.legend(handles, labels, loc="outside right center", fontsize=8, frameon=False)


def _legend(table: TableDeclaration, panels: Sequence[Column], cells: Grid) -> str:
    """What the marks are, and how much is missing."""
    drawn = [cells[row.name, column.heading] for row in table.rows for column in panels]
    measured = [cell for cell in drawn if isinstance(cell, Measured)]
    seeds = sorted({len(cell.values) for cell in measured})
    if not measured:
        return "Nothing has been measured yet."
    text = f"Mean over {' or '.join(map(str, seeds))} seed{'s' * (seeds != [1])}"
    text += "; bars: sample standard deviation" if seeds[-1] > 1 else "; no error bars"
    if not _compute_column(table):
        text += "; small dots: single seeds" * (seeds[-1] > 1)
        text += f"; in the other colour: {table.baseline}" if table.baseline else ""
    missing = len([cell for cell in drawn if isinstance(cell, str) and cell != "-"])
    return text + (f". Missing: {missing} of {len(measured) + missing} cells." if missing else ".")
