"""A filled table as Markdown and CSV: with the paper's numbers, and each row compared with the baseline."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import NamedTuple

from lab.tables import Column, Literature, Row, Table

NOTE = (
    "Difference of the means ± its standard error, over the seeds that both have; p of Welch's t-test, "
    "two-sided, for this one comparison."
)


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


def render_markdown(table: Table, cells: Grid, facts: Sequence[str]) -> str:
    """Heading, one line per row, notes, and how the numbers were made; cells of fewer seeds say how many."""
    headings = [""]
    for column in table.columns:
        headings += [column.heading, "paper"] if _has_paper(table, column) else [column.heading]
    lines = [table_line(headings), table_line(["---", *["---:"] * (len(headings) - 1)])]
    lines += [table_line(_row_cells(table, row, cells)) for row in table.rows]
    notes = [f"- {line}" for line in (*table.notes, *facts)]
    return "\n".join([f"## {table.title}", "", *lines, "", *notes, ""])


def _row_cells(table: Table, row: Row | Literature, cells: Grid) -> list[str]:
    """Name, cells, and the paper's numbers of a row."""
    line = [row.name]
    for column in table.columns:
        if isinstance(row, Literature):
            line.append("")
        else:
            is_best = row.name == _best(table, column, cells)
            line.append(_cell(cells[row.name, column.heading], is_best, _most_seeds(cells)))
        if _has_paper(table, column):
            number = paper_number(row, column)
            line.append("" if number is None else f"{number:.1f}")
    return line


def paper_number(row: Row | Literature, column: Column) -> float | None:
    """The paper's number, its own or of the literature; None if it has none."""
    if isinstance(row, Literature):
        return row.numbers.get(column.name)
    return column.paper.get(row.name)


def _has_paper(table: Table, column: Column) -> bool:
    return any(paper_number(row, column) is not None for row in table.rows)


def _most_seeds(cells: Grid) -> int:
    return max((len(cell.values) for cell in cells.values() if isinstance(cell, Measured)), default=0)


def _best(table: Table, column: Column, cells: Grid) -> str | None:
    """Name of the row with the highest mean; None if fewer than two have one, or if more is not better."""
    if column.is_cost or column.metric in ("tokens/perplexity", "tokens/dead"):
        return None
    means = {}
    for row in table.run_rows:
        cell = cells[row.name, column.heading]
        if isinstance(cell, Measured) and not math.isnan(cell.mean):
            means[row.name] = cell.mean
    return max(means, key=means.get) if len(means) > 1 else None


def _cell(cell: Measured | str, is_best: bool, most_seeds: int) -> str:
    if isinstance(cell, str):
        return cell
    value = f"**{cell.mean:.1f}**" if is_best else f"{cell.mean:.1f}"
    spread = "" if cell.spread is None else f" ± {cell.spread:.1f}"
    number = len(cell.values)
    return value + spread + (f" ({number} seed{'s' * (number > 1)})" if number < most_seeds else "")


def render_csv(table: Table, cells: Grid) -> str:
    """One line per cell: row, column, unit, mean, sample standard deviation, seeds, values, the paper's."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "column", "unit", "mean", "std", "seeds", "values", "paper", "missing"])
    for row in table.rows:
        for column in table.columns:
            cell = "-" if isinstance(row, Literature) else cells[row.name, column.heading]
            paper = paper_number(row, column)
            writer.writerow(
                [row.name, column.name, column.unit, *_csv_numbers(cell, "" if paper is None else paper)]
            )
    return text.getvalue()


def _csv_numbers(cell: Measured | str, paper: float | str) -> list[object]:
    if isinstance(cell, str):
        return ["", "", 0, "", paper, cell]
    spread = "" if cell.spread is None else f"{cell.spread:.4f}"
    values = " ".join(f"{value:.4f}" for value in cell.values)
    return [f"{cell.mean:.4f}", spread, len(cell.values), values, paper, ""]


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
    """Holm's correction: the p of each comparison if all of them were made; S. Holm, 1979.

    A comparison without a p, NaN, keeps it and is not counted among those that were made.
    """
    corrected = [math.nan] * len(chances)
    made = [index for index, chance in enumerate(chances) if not math.isnan(chance)]
    highest = 0.0
    for rank, index in enumerate(sorted(made, key=lambda index: chances[index])):
        highest = max(highest, min(1.0, (len(made) - rank) * chances[index]))
        corrected[index] = highest
    return corrected


def render_differences(table: Table, cells: Grid) -> str:
    """Each row less the table's baseline as Markdown; empty without a baseline or anything to compare.

    A note names the differences that are significant after Holm's correction for the whole table.
    """
    if table.baseline is None:
        return ""
    columns = [column for column in table.columns if not column.is_cost]
    compared = _differences(table, columns, cells)
    if not compared:
        return ""
    lines = [table_line([f"less {table.baseline}", *(column.heading for column in columns)])]
    lines.append(table_line(["---", *["---:"] * len(columns)]))
    for name, differences in compared.items():
        lines.append(table_line([name, *(str(one or "") for one in differences)]))
    found = [one for differences in compared.values() for one in differences if one]
    notes = ["One seed: a difference may be chance."]
    if max(one.seeds for one in found) > 1:
        notes = [NOTE, _significant(columns, compared)]
    return "\n".join(["", *lines, "", *(f"- {note}" for note in notes), ""])


def _differences(table: Table, columns: Sequence[Column], cells: Grid) -> dict[str, list[Difference | None]]:
    """Differences from the baseline, by row and in the order of columns, of rows that have any."""
    compared = {}
    for row in table.run_rows:
        if row.name == table.baseline:
            continue
        headings = [column.heading for column in columns]
        differences = [difference(cells[row.name, one], cells[table.baseline, one]) for one in headings]
        if any(differences):
            compared[row.name] = differences
    return compared


def _significant(columns: Sequence[Column], compared: Mapping[str, Sequence[Difference | None]]) -> str:
    """The note on what is significant after the correction."""
    chances = {}
    for name, differences in compared.items():
        for column, one in zip(columns, differences, strict=True):
            if one and one.chance is not None and not math.isnan(one.chance):
                chances[f"{name} ({column.name})"] = one.chance
    corrected = zip(chances, holm(list(chances.values())), strict=True)
    left = "; ".join(name for name, chance in corrected if chance < 0.05)
    return f"Holm's correction for {len(chances)} comparisons leaves p below 0.05 in: {left or 'no cell'}."


def table_line(cells: Sequence[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"
