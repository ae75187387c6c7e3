"""A filled table as Markdown and CSV: with the paper's numbers, and each row compared with the baseline."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import NamedTuple

from experiments.declaration import Column, TableDeclaration

NOTE = "Difference of the means ± its standard error, over the seeds that both have; p of Welch's t-test, "
NOTE += "two-sided, for one comparison alone."


class Measured(NamedTuple):
    """A cell over its seeds; mean and deviation are NaN if one of the values is."""

    mean: float
    spread: float | None  # sample standard deviation, None for one seed
    values: tuple[float, ...]
    seeds: tuple[int, ...]


# The measurement, or the reason for its absence, by row name and column heading.
Grid = Mapping[tuple[str, str], Measured | str]


def summarise(of_seed: Mapping[int, float]) -> Measured | None:
    """Mean and spread of a cell's seeds; None if there is no value."""
    values = tuple(of_seed.values())
    if not values:
        return None
    spread = None
    if len(values) > 1:
        spread = math.nan if any(map(math.isnan, values)) else stdev(values)
    return Measured(mean(values), spread, values, tuple(of_seed))


def render_markdown(table: TableDeclaration, cells: Grid, facts: Sequence[str]) -> str:
    """Heading, one line per row, notes, and how the numbers were made; cells of fewer seeds say how many."""
    headings = [""]
    for column in table.columns:
        headings += [column.heading, "paper"] if column.paper else [column.heading]
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


def _best(table: TableDeclaration, column: Column, cells: Grid) -> str | None:
    measured = {row.name: cells[row.name, column.heading] for row in table.rows}
    means = {name: cell.mean for name, cell in measured.items() if isinstance(cell, Measured)}
    means = {name: value for name, value in means.items() if not math.isnan(value)}
    # Of costs and of counts of tokens in use, more is not better.
    is_quality = not column.is_cost and column.metric not in ("tokens/perplexity", "tokens/dead")
    return max(means, key=means.get) if len(means) > 1 and is_quality else None


def _cell(cell: Measured | str, is_best: bool, most_seeds: int) -> str:
    if isinstance(cell, str):
        return cell
    value = f"**{cell.mean:.1f}**" if is_best else f"{cell.mean:.1f}"
    spread = "" if cell.spread is None else f" ± {cell.spread:.1f}"
    number = len(cell.values)
    return value + spread + (f" ({number} seed{'s' * (number > 1)})" if number < most_seeds else "")


def render_csv(table: TableDeclaration, cells: Grid) -> str:
    """One line per cell: row, column, unit, mean, sample standard deviation, seeds, values, the paper's."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "column", "unit", "mean", "std", "seeds", "values", "paper", "missing"])
    for row in table.rows:
        for column in table.columns:
            cell = cells[row.name, column.heading]
            numbers, missing = ["", "", 0, ""], cell
            if isinstance(cell, Measured):
                spread = "" if cell.spread is None else f"{cell.spread:.4f}"
                values = " ".join(f"{value:.4f}" for value in cell.values)
                numbers, missing = [f"{cell.mean:.4f}", spread, len(cell.values), values], ""
            paper = column.paper.get(row.name, "")
            writer.writerow([row.name, column.name, column.unit, *numbers, paper, missing])
    return text.getvalue()


class Difference(NamedTuple):
    """One cell less another over the seeds that both have."""

    mean: float
    error: float | None  # standard error of the difference of the means, None for one seed
    seeds: int
    chance: float | None  # two-sided p of Welch's t-test; None for one seed, or if no seed differs in either

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.mean:+.1f}"
        chance = "" if self.chance is None else "< 0.01" if self.chance < 0.005 else f"{self.chance:.2f}"
        return f"{self.mean:+.1f} ± {self.error:.1f}" + (chance and f", p {chance}")


def difference(one: Measured | str, other: Measured | str) -> Difference | None:
    """The difference of two cells; None unless they have a seed in common.

    Seeds are not paired: the seed that is good for one objective is not the other's good seed.
    """
    if isinstance(one, str) or isinstance(other, str):
        return None
    of_seed = [dict(zip(cell.seeds, cell.values, strict=True)) for cell in (one, other)]
    common = sorted(of_seed[0].keys() & of_seed[1].keys())
    ours, theirs = (summarise({seed: cell[seed] for seed in common}) for cell in of_seed)
    if ours is None or theirs is None:
        return None
    error, chance = None, None
    if ours.spread is not None and theirs.spread is not None:
        error = math.hypot(ours.spread, theirs.spread) / math.sqrt(len(common))
        if error:
            from scipy.stats import ttest_ind_from_stats  # comes with scikit-learn

            cells = (ours.mean, ours.spread, len(common), theirs.mean, theirs.spread, len(common))
            chance = float(ttest_ind_from_stats(*cells, equal_var=False).pvalue)
    return Difference(ours.mean - theirs.mean, error, len(common), chance)


def holm(chances: Sequence[float]) -> list[float]:
    """Holm's correction: the p of each comparison if all of them were made; S. Holm, 1979."""
    corrected, highest = [math.nan] * len(chances), 0.0
    for rank, index in enumerate(sorted(range(len(chances)), key=lambda index: chances[index])):
        highest = max(highest, min(1.0, (len(chances) - rank) * chances[index]))
        corrected[index] = highest
    return corrected


def render_differences(table: TableDeclaration, cells: Grid) -> str:
    """Each row less the table's baseline as Markdown; empty without a baseline or anything to compare.

    A note names the differences that remain after Holm's correction over the whole table.
    """
    columns = [column.heading for column in table.columns if not column.is_cost]
    lines, chances, most = [], {}, 0
    for row in table.rows:
        if table.baseline not in (None, row.name):
            differences = [difference(cells[row.name, one], cells[table.baseline, one]) for one in columns]
            if any(differences):
                lines.append(table_line([row.name, *(str(one or "") for one in differences)]))
            for column, one in zip(columns, differences, strict=True):
                most = max(most, one.seeds if one else 0)
                if one and one.chance is not None:
                    chances[f"{row.name} ({column.rpartition(' (')[0]})"] = one.chance
    if not lines:
        return ""
    notes = [NOTE, _survivors(chances)] if most > 1 else ["One seed: a difference may be chance."]
    head = [table_line([f"less {table.baseline}", *columns]), table_line(["---", *["---:"] * len(columns)])]
    return "\n".join(["", *head, *lines, "", *(f"- {note}" for note in notes), ""])


def _survivors(chances: Mapping[str, float]) -> str:
    corrected = zip(chances, holm(list(chances.values())), strict=True)
    left = "; ".join(name for name, chance in corrected if chance < 0.05)
    return f"Holm's correction for {len(chances)} comparisons leaves p below 0.05 in: {left or 'no cell'}."


def table_line(cells: Sequence[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"
