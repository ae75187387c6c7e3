"""Reports: a self-contained HTML page, and its table for the terminal."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from mapet_mm.utils.atomic_files import replace_file

DOTS_PER_INCH = 200
NO_VALUE = "–"

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 4rem; background: #fff; color: #1d1d24;
       font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .6rem; padding-top: .8rem; border-top: 1px solid #e3e3ea; }
p { margin: .4rem 0 .8rem; max-width: 46rem; }
.note, figcaption { color: #585866; font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .95rem; }
th, td { padding: .4rem .9rem .4rem 0; border-bottom: 1px solid #e3e3ea; text-align: left;
         vertical-align: top; }
th { font-weight: 600; vertical-align: bottom; }
td:first-child { min-width: 7rem; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
figure { margin: .8rem 0; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; }
.pictures img { max-width: 100%; height: auto; display: block; }
pre { background: #f5f5f9; padding: .8rem; border-radius: 6px; font-size: .8rem; line-height: 1.6;
      white-space: pre-wrap; overflow-wrap: anywhere; }
pre code { display: block; padding-left: 1.5em; text-indent: -1.5em; margin-bottom: .35rem; }
@media (max-width: 480px) { th, td { padding-right: .5rem; font-size: .8rem; } }
""".strip()


@dataclass(frozen=True)
class Column:
    """A table's column: its heading with the unit and, for numbers, their format ('.1f', '+.1f')."""

    heading: str
    format: str = ""

    @property
    def is_number(self) -> bool:
        """Whether the column holds numbers, which are aligned right."""
        return bool(self.format)

    def text(self, cell: str | float | None) -> str:
        """The displayed text of a cell; None, a missing figure, is a dash."""
        if cell is None:
            return NO_VALUE
        return format(cell, self.format) if self.is_number else str(cell)


@dataclass(frozen=True)
class Table:
    """Columns, rows with one cell per column, and notes below.

    Raises:
        ValueError: a row has another number of cells than there are columns.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | float | None]]
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table row {list(row)} has {len(row)} cells for {len(self.columns)} columns"
                )

    def texts(self) -> list[list[str]]:
        """The displayed text of the rows."""
        return [
            [column.text(cell) for column, cell in zip(self.columns, row, strict=True)] for row in self.rows
        ]


@dataclass(frozen=True)
class Section:
    """Pictures with captions under one heading; they wrap on a narrow page."""

    title: str
    caption: str
    figures: Sequence[Figure]


@dataclass(frozen=True)
class Report:
    """Contents of a report, in the order in which `write_report` shows them.

    Args:
        title: the page's title.
        summary: a sentence or two about the run and the machine.
        results: the results.
        sections: pictures.
        stages: the stages with their durations in seconds.
        facts: name and value of everything that the figures depend on: versions, machine, seeds.
        commands: the exact command lines, in order.
    """

    title: str
    summary: str
    results: Table
    sections: Sequence[Section] = ()
    stages: Table | None = None
    facts: Sequence[tuple[str, str]] = ()
    commands: Sequence[str] = field(default=())


def format_table(table: Table) -> str:
    """A table as plain text for the terminal, columns aligned, notes below."""
    lines = [[column.heading for column in table.columns], *table.texts()]
    widths = [max(len(line[place]) for line in lines) for place in range(len(table.columns))]
    aligned = [
        "  ".join(
            cell.rjust(width) if column.is_number else cell.ljust(width)
            for column, cell, width in zip(table.columns, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([aligned[0], rule, *aligned[1:], *(f"({note})" for note in table.notes)])


def write_report(path: str | os.PathLike, report: Report) -> Path:
    """Write the report as one HTML file that loads nothing from anywhere.

    Args:
        path: the file to write; it appears complete or not at all.
        report: what to show.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, render_report(report).encode())
    return path


def render_report(report: Report) -> str:
    """The report as HTML text."""
    parts = [
        f"<h1>{escape(report.title)}</h1>",
        f"<p>{escape(report.summary)}</p>",
        "<h2>Results</h2>",
        _table(report.results),
        *(_section(section) for section in report.sections),
    ]
    if report.stages is not None:
        parts += ["<h2>Stages</h2>", _table(report.stages)]
    if report.facts:
        parts += ["<h2>What it ran on</h2>", _table(Table([Column("what"), Column("value")], report.facts))]
    if report.commands:
        lines = "".join(f"<code>{escape(command)}</code>" for command in report.commands)
        parts += ["<h2>Commands</h2>", f"<pre>{lines}</pre>"]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _table(table: Table) -> str:
    kinds = [' class="number"' if column.is_number else "" for column in table.columns]
    headings = zip(kinds, table.columns, strict=True)
    head = "".join(f"<th{kind}>{escape(column.heading)}</th>" for kind, column in headings)
    rows = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{escape(c)}</td>" for kind, c in zip(kinds, row, strict=True)) + "</tr>"
        for row in table.texts()
    )
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in table.notes)
    table_text = f"<table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table>"
    return f'<div class="scroll">{table_text}</div>{notes}'


def _section(section: Section) -> str:
    title = escape(section.title)
    pictures = "\n".join(_image(figure, title) for figure in section.figures)
    return (
        f'<h2>{title}</h2>\n<figure><div class="pictures">{pictures}</div>\n'
        f"<figcaption>{escape(section.caption)}</figcaption></figure>"
    )


def _image(figure: Figure, alternative: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, facecolor="white")
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    # A CSS pixel is 1/96 inch: the picture's text is as large as the page's.
    width = round(96 * figure.get_figwidth())
    return f'<img alt="{alternative}" width="{width}" src="data:image/png;base64,{data}">'
