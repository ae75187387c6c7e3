"""The Markdown pages."""

import re

import pytest
from config_building import ROOT

RULE = re.compile(r"\|( *:?-+:? *\|)+")
PAGES = [path for pattern in ("*.md", "docs/**/*.md", "configs/**/*.md") for path in ROOT.glob(pattern)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_row_belongs_to_a_table_with_a_head(page):
    """A blank line inside a table leaves rows that are shown as text."""
    for block in re.split(r"\n\s*\n", page.read_text()):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert not rows or RULE.fullmatch("".join(rows[1:2])), f"no head above {rows[0][:80]}"


def test_the_tests_that_the_guarantees_name_exist():
    """A `::name` alone is in the file named before it."""
    file = ""
    named = re.findall(r"`((?:tests/[\w/]+\.py)?)::(test_\w+)`", (ROOT / "docs/guarantees.md").read_text())
    assert len(named) > 20
    for path, name in named:
        file = path or file
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"
