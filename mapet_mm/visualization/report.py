"""Reports: a self-contained HTML page, and its table for the terminal."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from mapet_mm.utils.atomic_files import replace_file

DOTS_PER_INCH = 200

STYLE = """
body { box-sizing: border-box; margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 4rem;
       background: #fff; color: #1d1d24; font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .6rem; padding-top: .8rem; border-top: 1px solid #e3e3ea; }
p { margin: .4rem 0 .8rem; max-width: 46rem; }
.note, figcaption { color: #585866; font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .95rem; }
th, td { padding: .4rem .9rem .4rem 0; border-bottom: 1px solid #e3e3ea; text-align: left; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
figure { margin: .8rem 0; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; }
.pictures img { max-width: 100%; height: auto; }
pre { background: #f5f5f9; padding: .8rem; font-size: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
pre code { display: block; padding-left: 1.5em; text-indent: -1.5em; }
"""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body>
{body}
</body></html>
"""


class Column(NamedTuple):
    """A table's column: its heading with the unit and, for numbers, their format ('.1f', '+.1f')."""

    heading: str
    format: str = ""


class Table(NamedTuple):
    """Columns, rows with one cell per column, and notes below."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | float | None]]
    notes: Sequence[str] = ()

    def texts(self) -> list[list[str]]:
        """The displayed text of the rows; None, a missing figure, is a dash."""
        formats = [column.format for column in self.columns]
        return [
            ["–" if cell is None else format(cell, one) for cell, one in zip(row, formats, strict=True)]
            for row in self.rows
        ]


class Section(NamedTuple):
    """Pictures with captions under one heading; they wrap on a narrow page."""

    title: str
    caption: str
    figures: Sequence[Figure]


class Report(NamedTuple):
    """Contents of a report, in the order in which `write_report` shows them."""

    title: str
    summary: str  # a sentence or two
    results: Table
    sections: Sequence[Section] = ()
    facts: Sequence[tuple[str, str]] = ()  # that the figures depend on: versions, machine, seeds
    commands: Sequence[str] = ()  # exact, in order


def format_table(table: Table) -> str:
    """A table as plain text for the terminal, numbers aligned right, notes below."""
    lines = [[column.heading for column in table.columns], *table.texts()]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    layout = "  ".join(
        f"{{:{'>' if column.format else '<'}{width}}}"
        for column, width in zip(table.columns, widths, strict=True)
    )
    head, *rows = [layout.format(*line).rstrip() for line in lines]
    rule = "-" * len(layout.format(*lines[0]))
    return "\n".join([head, rule, *rows, *(f"({note})" for note in table.notes)])


def write_report(path: str | os.PathLike, report: Report) -> Path:
    """Write the report as one HTML file that loads nothing; it appears complete or not at all."""
    parts = [f"<h1>{escape(report.title)}</h1>", f"<p>{escape(report.summary)}</p>"]
    parts += ["<h2>Results</h2>", _table(report.results), *map(_section, report.sections)]
    if report.facts:
        parts += ["<h2>What it ran on</h2>", _table(Table([Column("what"), Column("value")], report.facts))]
    if report.commands:
        lines = "".join(f"<code>{escape(command)}</code>" for command in report.commands)
        parts += ["<h2>Commands</h2>", f"<pre>{lines}</pre>"]
    page = PAGE.format(title=escape(report.title), style=STYLE, body="\n".join(parts))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, page.encode())
    return path


def _table(table: Table) -> str:
    kinds = [' class="number"' if column.format else "" for column in table.columns]

    def line(tag: str, cells: Iterable[str]) -> str:
        pairs = zip(kinds, cells, strict=True)
        return f"<tr>{''.join(f'<{tag}{kind}>{escape(cell)}</{tag}>' for kind, cell in pairs)}</tr>"

    head = line("th", [column.heading for column in table.columns])
    rows = "\n".join(line("td", cells) for cells in table.texts())
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in table.notes)
    whole = f"<table><thead>{head}</thead>\n<tbody>{rows}</tbody></table>"
    return f'<div class="scroll">{whole}</div>{notes}'


def _section(section: Section) -> str:
    title, pictures = escape(section.title), []
    for figure in section.figures:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, facecolor="white")
        data = base64.b64encode(buffer.getvalue()).decode("ascii")
        # A CSS pixel is 1/96 inch: the picture's text is as large as the page's.
        width = round(96 * figure.get_figwidth())
        pictures.append(f'<img alt="{title}" width="{width}" src="data:image/png;base64,{data}">')
    shown = '<div class="pictures">' + "\n".join(pictures) + "</div>"
    return f"<h2>{title}</h2>\n<figure>{shown}\n<figcaption>{escape(section.caption)}</figcaption></figure>"
