"""Commands on the pages: tables that they name are declared, and show.py takes its arguments."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import show
from lab.tables import list_tables

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for pattern in ("*.md", "docs/**/*.md", "research/**/*.md")
    for page in sorted(ROOT.glob(pattern))
    if "research/Snakefile" in page.read_text()
    or "show.py" in page.read_text()
    or page.parts[-3] == "research"
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_table_that_a_page_names_is_declared(page):
    text = page.read_text()
    named = re.findall(r"(?:table=|<!-- table: )([\w/]+)", text)
    assert set(named) - {"sweep", "NAME"} <= list_tables().keys()


def test_every_picture_and_table_on_the_pages_is_shown_by_a_right_command(monkeypatch):
    found = 0
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ").replace("\n  ", " ")
        for command in re.findall(r"python research/(show\.py [^`\n#]+)", text):
            monkeypatch.setattr(sys, "argv", shlex.split(command))
            tables = show.parse_args().tables
            assert set(tables) <= list_tables().keys()
            found += 1
    assert found >= 4
