"""Rows of several checkpoints in one table, and their pictures side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from mapet_mm.evaluation.protocol import Row
from mapet_mm.visualization.report import Column, Section, Table


def results_table(results: Mapping[str, Sequence[Row]]) -> Table:
    """One column per checkpoint, one line per figure.

    Args:
        results: the rows by the checkpoint's name.
    """
    keys = {row.key: None for rows in results.values() for row in rows if not row.detail}
    columns = [Column("result"), Column("figure"), *(Column(name) for name in results)]
    found = {name: {row.key: row for row in rows} for name, rows in results.items()}
    lines = [[*key, *(_cell(found[name].get(key)) for name in results)] for key in keys]
    return Table(columns, lines)


def _cell(row: Row | None) -> str | None:
    if row is None:
        return None
    spread = "" if row.spread is None else f" ± {row.spread:.1f}"
    interval = "" if row.interval is None else " [{:.1f}, {:.1f}]".format(*row.interval)
    note = f" ({row.note})" if row.note else ""
    return f"{row.value:.{1 if abs(row.value) >= 1 else 3}f}{spread}{interval}{note}"


def side_by_side(sections: Sequence[Section]) -> list[Section]:
    """Sections with the pictures of all checkpoints under each heading, in the order of the first."""
    merged: dict[tuple[str, str], list[Figure]] = {}
    for section in sections:
        merged.setdefault((section.title, section.caption), []).extend(section.figures)
    return [Section(*heading, figures) for heading, figures in merged.items()]
