"""Tables of results, for the terminal, HTML pages and files."""

from collections.abc import Sequence
from typing import NamedTuple

MISSING = "–"


class Column(NamedTuple):
    """A table's column.

    Args:
        heading: what it shows, with the unit.
        format: of its numbers, such as '.1f' or '+.1f'; empty for text.
    """

    heading: str
    format: str = ""

    @property
    def is_number(self) -> bool:
        """Numbers are aligned right."""
        return bool(self.format)


class Table(NamedTuple):
    """Columns, rows with one cell per column, and notes below.

    Examples:
        >>> table = Table([Column("task"), Column("top-1 (%)", ".1f")], [["linear probe", 63.24]])
        >>> print(format_table(table))
        task          top-1 (%)
        -----------------------
        linear probe       63.2
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | float | None]]
    notes: Sequence[str] = ()

    def texts(self) -> list[list[str]]:
        """The displayed text of each cell by row; None, a missing figure, is a dash."""
        return [
            [_text(cell, column) for cell, column in zip(row, self.columns, strict=True)] for row in self.rows
        ]


def format_table(table: Table) -> str:
    """A table as plain text for the terminal: numbers aligned right, notes below."""
    headings = [column.heading for column in table.columns]
    lines = [headings, *table.texts()]
    widths = [max(len(cell) for cell in cells) for cells in zip(*lines, strict=True)]

    def aligned(line: Sequence[str]) -> str:
        cells = []
        for cell, column, width in zip(line, table.columns, widths, strict=True):
            cells.append(cell.rjust(width) if column.is_number else cell.ljust(width))
        return "  ".join(cells)

    rule = "-" * len(aligned(headings))
    head, *rows = [aligned(line).rstrip() for line in lines]
    notes = [f"({note})" for note in table.notes]
    return "\n".join([head, rule, *rows, *notes])


def _text(cell: str | float | None, column: Column) -> str:
    if cell is None:
        return MISSING
    return format(cell, column.format)
