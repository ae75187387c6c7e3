"""Recompute every printed cell, p and note on Holm's correction of research/results from records.jsonl.

A page marks tables up to the next heading. Figures without a deviation are seed 0's.
"""

import re
import sys
from collections.abc import Iterator
from statistics import mean, stdev

from lab.paths import RESEARCH
from lab.records import read_kept
from lab.show import FilledTable
from lab.tables import load_table
from scipy.stats import ttest_ind

RECORDS = read_kept()
MARK = re.compile(r"<!-- table: (\S+), evaluation (\d) -->\n(.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL)
Figures = dict[tuple[str, str], list[float]]  # of each seed, by row and heading
# The mean of these chooses settings.
CHOOSING = ("k-NN (top-1, %)", "10 labels a class (top-1, %)", "attentive probe (top-1, %)")
MEAN = "mean of k-NN, 10 labels and attentive probe (%)"


def table_figures(name: str, version: int) -> Figures:
    """The figures of a declared table by row and heading, in the order of the seeds."""
    filled = FilledTable(load_table(name), range(3), RECORDS, version)
    figures: Figures = {}
    for cell in filled.plan.cells:
        if (value := filled.value(cell)) is not None:
            figures.setdefault((cell.row, cell.column), []).append(value)
    for row in filled.table.run_rows:
        parts = [figures.get((row.name, heading), []) for heading in CHOOSING]
        if len(set(map(len, parts))) == 1 and parts[0]:  # measured for as many seeds
            figures[row.name, MEAN] = list(map(mean, zip(*parts, strict=True)))
    return figures


def sweep_figures() -> Figures:
    """The figures of the sweep of learning rates, which is frozen: its records say their rows."""
    columns = load_table("fashion_mnist/cutting_point").columns[:5]
    figures: Figures = {}
    for record in RECORDS.values():
        if row := record.get("sweep"):
            values = [record["metrics"][column.metric.format(**column.values)] for column in columns]
            figures |= {(row, one.heading): [value] for one, value in zip(columns, values, strict=True)}
            figures[row, "mean of the last three (%)"] = [mean(values[2:])]
            figures[row, "pre-training (TFLOPs)"] = [RECORDS[record["needs"][0]]["teraflops"]]
    return figures


def printed_cells(section: str) -> Iterator[tuple[str, str, str, str]]:
    """Baseline ("" without one), row, heading and text of each cell of a section's tables."""
    for block in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        head, _, *lines = block.splitlines()
        corner, *headings = head[2:-2].split(" | ")
        for line in lines:
            name, *cells = line.replace("**", "")[2:-2].split(" | ")
            for heading, cell in zip(headings, cells, strict=True):
                if heading != "paper":
                    yield corner.strip().removeprefix("less "), name, heading, cell.strip()


def holm_note(chances: dict[str, float]) -> str:
    """The note on the comparisons that are significant after Holm's correction."""
    ordered = sorted(chances, key=chances.get)
    corrected = [chances[name] * (len(ordered) - rank) for rank, name in enumerate(ordered)]
    kept = next((rank for rank, p in enumerate(corrected) if p >= 0.05), len(ordered))
    left = "; ".join(name for name in chances if name in ordered[:kept])
    return f"Holm's correction for {len(ordered)} comparisons leaves p below 0.05 in: {left or 'no cell'}."


def compared(values: list[float], other: list[float]) -> tuple[str, float]:
    """Difference of two cells, its standard error and the p of Welch's t-test, as text; and the p."""
    p = ttest_ind(values, other, equal_var=False).pvalue
    error = ((stdev(values) ** 2 + stdev(other) ** 2) / len(values)) ** 0.5
    shown = "< 0.01" if p < 0.005 else f"{p:.2f}"
    return f"{mean(values) - mean(other):+.1f} ± {error:.1f}, p {shown}", p


def check(section: str, figures: Figures) -> Iterator[str]:
    """For each cell of a section, and for its note, "" or what is wrong with it."""
    chances: dict[str, float] = {}
    for baseline, row, heading, printed in printed_cells(section):
        values, other = figures.get((row, heading)), figures.get((baseline, heading))
        expected = printed if printed in ("", "-", "not run") else "nothing"
        if values and other:
            expected, chances[f"{row} ({heading.rpartition(' (')[0]})"] = compared(values, other)
        elif values and not baseline:
            expected = f"{mean(values):.1f} ± {stdev(values):.1f}" if "±" in printed else f"{values[0]:.1f}"
        yield "" if printed == expected else f"{row}, {heading}: {printed}, the records give {expected}"
    if chances:
        yield "" if holm_note(chances) in section else f"the records give: {holm_note(chances)}"


def check_pages(pages: str) -> list[str]:
    """For each marked cell in the text of pages "" or what is wrong with it."""
    lines: list[str] = []
    for name, version, section in MARK.findall(pages):
        lines += check(section, sweep_figures() if name == "sweep" else table_figures(name, int(version)))
    return lines


if __name__ == "__main__":
    checked = check_pages("\n".join(page.read_text() for page in RESEARCH.glob("results/*.md")))
    print(f"{len(checked)} cells recomputed", *filter(None, checked), sep="\n")
    sys.exit(any(checked))
