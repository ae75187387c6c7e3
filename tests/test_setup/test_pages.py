"""The Markdown pages."""

import re
import subprocess

import pytest
from config_building import ROOT

RULE = re.compile(r"\|( *:?-+:? *\|)+")
PAGES = subprocess.run(
    ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False
).stdout.split()


@pytest.mark.parametrize("page", PAGES or sorted(str(path) for path in ROOT.glob("*.md")))
def test_every_row_belongs_to_a_table_with_a_head(page):
    """A blank line inside a table leaves rows that are shown as text."""
    blocks = re.split(r"\n\s*\n", (ROOT / page).read_text())
    for block in blocks:
        lines = [line.strip() for line in block.splitlines()]
        rows = [line for line in lines if line.startswith("|")]
        if rows and not any(line.startswith("```") for line in lines):
            assert len(rows) > 1 and RULE.fullmatch(rows[1]), f"{page}: no head above {rows[0][:80]}"
