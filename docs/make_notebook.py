"""Make a tutorial's notebook from its page: python docs/make_notebook.py docs/tutorials/own_images.md

Configs become cells that write them, commands cells that run them; all else stays text.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

FENCE = re.compile(r"```(\w+)\n(.*?)```\n", re.DOTALL)
KERNEL = dict(kernelspec=dict(display_name="Python 3", language="python", name="python3"))


def notebook(page: str) -> dict[str, Any]:
    """The notebook of a page in Markdown; what has placeholders (`CONFIG`), and parts of configs, is text."""
    cells = [("code", "%cd ../.."), ("markdown", "")]
    end = 0
    for block in FENCE.finditer(page):
        language, code = block.groups()
        file = re.match(r"# (configs/\S+\.py)\n", code)
        cells[-1] = (cells[-1][0], cells[-1][1] + page[end : block.start()])
        end = block.end()
        if language == "python" and file:
            cells += [("code", f"%%writefile {file[1]}\n{code}"), ("markdown", "")]
        elif language == "bash" and not re.search("CONFIG|MAPET_MM", code):
            cells += [("code", "".join(f"!{line}\n" for line in code.splitlines())), ("markdown", "")]
        else:
            cells[-1] = ("markdown", cells[-1][1] + block[0])
    cells[-1] = ("markdown", cells[-1][1] + page[end:])
    return dict(
        cells=[cell(number, *each) for number, each in enumerate(cells) if each[1].strip()],
        metadata=KERNEL,
        nbformat=4,
        nbformat_minor=5,
    )


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
