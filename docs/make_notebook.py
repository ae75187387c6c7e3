"""Make a tutorial's notebook from its page: python docs/make_notebook.py docs/tutorials/own_images.md

Blocks of `py` become cells; all else stays text.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

CELL = re.compile(r"```py\n(.*?)```\n", re.DOTALL)
KERNEL = dict(kernelspec=dict(display_name="Python 3", language="python", name="python3"))


def notebook(page: str) -> dict[str, Any]:
    """The notebook of a page in Markdown."""
    texts_and_codes = CELL.split(page)  # text, code, text, code, ..., text
    cells = []
    for number, content in enumerate(texts_and_codes):
        kind = "code" if number % 2 else "markdown"
        if content.strip():
            cells.append(cell(number, kind, content))
    return dict(cells=cells, metadata=KERNEL, nbformat=4, nbformat_minor=5)


def cell(number: int, kind: str, text: str) -> dict[str, Any]:
    """A cell without outputs."""
    made = dict(
        cell_type=kind, id=f"cell-{number}", metadata={}, source=text.strip().splitlines(keepends=True)
    )
    return made | (dict(execution_count=None, outputs=[]) if kind == "code" else {})


def text_of(page: Path) -> str:
    """The text of the notebook's file."""
    return json.dumps(notebook(page.read_text()), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        page.with_suffix(".ipynb").write_text(text_of(page))
