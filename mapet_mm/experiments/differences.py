"""What a table's rows differ by, seed by seed, and whether chance could make such a difference."""

from __future__ import annotations

from statistics import mean, stdev
from typing import NamedTuple

from mapet_mm.experiments.render import Grid, Measured, table_line
from mapet_mm.experiments.table import TableDeclaration

# Largest spread of seeds that all differ by the same, as a share of the values: what rounding makes of it
# where accuracies come out of float32.
ROUNDING = 1e-6


class Difference(NamedTuple):
    """One cell less another over the seeds that both have.

    Args:
        mean: of the seeds' differences.
        spread: their sample standard deviation, None for one seed; 0 where it is within rounding.
        seeds: the number of seeds.
        chance: two-sided p of a paired t-test: how often chance alone would make a mean at least as far from
            0; None for one seed, or if all seeds differ by the same.
    """

    mean: float
    spread: float | None
    seeds: int
    chance: float | None


def paired_difference(one: Measured | str, other: Measured | str) -> Difference | None:
    """The difference of two cells; None unless they have a seed in common."""
    if isinstance(one, str) or isinstance(other, str):
        return None
    ours, theirs = (dict(zip(cell.seeds, cell.values, strict=True)) for cell in (one, other))
    differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if not differences:
        return None
    spread = stdev(differences) if len(differences) > 1 else None
    if spread and spread <= ROUNDING * max(map(abs, (*ours.values(), *theirs.values()))):
        spread = 0.0
    chance = _chance(differences) if spread else None
    return Difference(mean(differences), spread, len(differences), chance)


def _chance(differences: list[float]) -> float:
    from scipy.stats import ttest_1samp  # comes with scikit-learn

    return float(ttest_1samp(differences, 0.0).pvalue)


def render_differences(table: TableDeclaration, cells: Grid) -> str:
    """Each row less the table's baseline as Markdown; empty without a baseline or anything to compare."""
    if table.baseline is None:
        return ""
    columns = [column for column in table.columns if not column.is_cost]
    lines, every = [], []
    for row in table.rows:
        differences = [
            paired_difference(cells[row.name, column.heading], cells[table.baseline, column.heading])
            for column in columns
        ]
        if row.name != table.baseline and any(differences):
            lines.append(table_line([row.name, *map(_shown, differences)]))
            every += filter(None, differences)
    if not lines:
        return ""
    heading = [f"less {table.baseline}", *(column.heading for column in columns)]
    rule = table_line(["---", *["---:"] * len(columns)])
    below = [f"- {line}" for line in _reading(every)]
    return "\n".join(["", table_line(heading), rule, *lines, "", *below, ""])


def _shown(difference: Difference | None) -> str:
    if difference is None:
        return ""
    if difference.spread is None:
        return f"{difference.mean:+.1f}"
    chance = "" if difference.chance is None else f", p {_rounded(difference.chance)}"
    return f"{difference.mean:+.1f} ± {difference.spread:.1f}{chance}"


def _rounded(chance: float) -> str:
    return f"{chance:.2f}" if chance >= 0.005 else "< 0.01"


def _reading(differences: list[Difference]) -> list[str]:
    """How to read the table, by the seeds that it stands on."""
    numbers = sorted({difference.seeds for difference in differences})
    tested = [difference.chance for difference in differences if difference.chance is not None]
    if numbers == [1]:
        return ["One seed: nothing says which of these differences chance would make."]
    shown = "Differences seed by seed: mean ± sample standard deviation"
    if not tested:
        return [f"{shown}. In no comparison do the differences of the seeds differ, so none has a p."]
    from scipy.stats import t as student

    below = sum(chance < 0.05 for chance in tested)
    bounds = ", ".join(
        f"{student.ppf(0.975, number - 1) / number**0.5:.1f} standard deviations with {number} seeds"
        for number in numbers
        if number > 1
    )
    return [
        f"{shown}; p: how often chance alone would make a mean this far from 0 (paired t-test, two-sided, "
        "not corrected for the number of comparisons).",
        f"p is below 0.05 from {bounds} on; without any true difference, about {0.05 * len(tested):.1f} of "
        f"the {len(tested)} comparisons would be, here {below} are. A larger p does not say that two rows "
        "are equal.",
    ]
