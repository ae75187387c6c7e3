"""Reports: self-contained HTML pages of results, pictures and commands."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader
from matplotlib.figure import Figure

from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.tables import Column, Table

TEMPLATE = "report.html.jinja"
DOTS_PER_INCH = 200
CSS_PIXELS_PER_INCH = 96


class Section(NamedTuple):
    """Pictures with a caption under one heading; they wrap on a narrow page."""

    title: str
    caption: str
    figures: Sequence[Figure]


class Report(NamedTuple):
    """Contents of a report, in the order in which the page shows them."""

    title: str
    summary: str  # a sentence or two
    results: Table
    sections: Sequence[Section] = ()
    facts: Sequence[tuple[str, str]] = ()  # that the figures depend on: versions, machine, seeds
    commands: Sequence[str] = ()  # exact, in order


def write_report(path: str | os.PathLike, report: Report) -> Path:
    """Write the report as one HTML file that loads nothing; it appears complete or not at all."""
    path = Path(path)
    page = (
        _environment()
        .get_template(TEMPLATE)
        .render(
            report=report,
            facts=Table([Column("what"), Column("value")], report.facts),
        )
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, page.encode())
    return path


def _environment() -> Environment:
    """Jinja with our templates; whatever they show is escaped."""
    environment = Environment(loader=PackageLoader("mapet_mm", "visualization"), autoescape=True)
    environment.filters["png"] = _png
    environment.filters["css_width"] = _css_width
    return environment


def _png(figure: Figure) -> str:
    """The picture of a figure, as the text of a data URL."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, facecolor="white")
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _css_width(figure: Figure) -> int:
    """The width at which the picture's text is as large as the page's."""
    return round(CSS_PIXELS_PER_INCH * figure.get_figwidth())
