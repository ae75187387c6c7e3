"""A filled table as Markdown and CSV, with the paper's numbers beside the measured ones."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import NamedTuple

from mapet_mm.experiments.table import Column, TableDeclaration


class Measured(NamedTuple):
    """A cell over its seeds: mean, sample standard deviation (None for one seed), the values, their seeds."""

    mean: float
    spread: float | None
    values: tuple[float, ...]
    seeds: tuple[int, ...] = ()


# What was measured, or why nothing was, by row name and column heading.
Grid = Mapping[tuple[str, str], Measured | str]


def summarise(values: Iterable[float], seeds: Iterable[int] = ()) -> Measured | None:
    """Mean and spread of a cell's seeds; None if there is no value."""
    values = tuple(values)
    if not values:
        return None
    return Measured(mean(values), stdev(values) if len(values) > 1 else None, values, tuple(seeds))


def render_markdown(table: TableDeclaration, cells: Grid, facts: Sequence[str]) -> str:
    """Heading, one line per row, notes, and how the numbers were made; cells of fewer seeds say how many."""
    headings = [""]
    for column in table.columns:
        headings.append(column.heading)
        if column.paper:
            headings.append("paper")
    best = {column.heading: _best(table, column, cells) for column in table.columns}
    most = max((len(cell.values) for cell in cells.values() if isinstance(cell, Measured)), default=0)
    lines = [table_line(headings), table_line(["---", *["---:"] * (len(headings) - 1)])]
    for row in table.rows:
        line = [row.name]
        for column in table.columns:
            line.append(_cell(cells[row.name, column.heading], row.name == best[column.heading], most))
            if column.paper:
                line.append(f"{column.paper[row.name]:.1f}" if row.name in column.paper else "")
        lines.append(table_line(line))
    below = [f"- {line}" for line in (*table.notes, *facts)]
    return "\n".join([f"## {table.title}", "", *lines, "", *below, ""])


def render_csv(table: TableDeclaration, cells: Grid) -> str:
    """One line per cell: row, column, unit, mean, sample standard deviation, seeds, values, the paper's."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "column", "unit", "mean", "std", "seeds", "values", "paper", "missing"])
    for row in table.rows:
        for column in table.columns:
            cell = cells[row.name, column.heading]
            numbers = ["", "", 0, ""] if isinstance(cell, str) else _numbers(cell)
            missing = cell if isinstance(cell, str) else ""
            paper = column.paper.get(row.name, "")
            writer.writerow([row.name, column.name, column.unit, *numbers, paper, missing])
    return text.getvalue()


def _numbers(cell: Measured) -> list[str | int]:
    spread = "" if cell.spread is None else f"{cell.spread:.4f}"
    values = " ".join(f"{value:.4f}" for value in cell.values)
    return [f"{cell.mean:.4f}", spread, len(cell.values), values]


def _best(table: TableDeclaration, column: Column, cells: Grid) -> str | None:
    measured = {row.name: cells[row.name, column.heading] for row in table.rows}
    means = {name: cell.mean for name, cell in measured.items() if isinstance(cell, Measured)}
    return max(means, key=means.get) if len(means) > 1 and column.has_best else None


def _cell(cell: Measured | str, is_best: bool, most_seeds: int) -> str:
    if isinstance(cell, str):
        return cell
    value = f"**{cell.mean:.1f}**" if is_best else f"{cell.mean:.1f}"
    spread = "" if cell.spread is None else f" ± {cell.spread:.1f}"
    number = len(cell.values)
    return value + spread + (f" ({number} seed{'s' * (number > 1)})" if number < most_seeds else "")


def table_line(cells: Sequence[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"
