"""A building of its own: the product neither imports the laboratory nor ships it."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from setuptools import find_packages

ROOT = Path(__file__).parents[2]
OURS = {"research", *(path.stem for path in (ROOT / "research").iterdir() if path.suffix in ("", ".py"))}


def imported(file: Path) -> Iterator[str]:
    """First part of each name that a file imports, from anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]


def test_nothing_in_the_product_imports_or_names_the_laboratory():
    assert {"lab", "recompute", "converters"} <= OURS
    files = [*(ROOT / "mapet_mm").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    assert len(files) > 100
    ours = OURS - {"configs"} - set(sys.stdlib_module_names)
    assert not [(str(file), name) for file in files for name in imported(file) if name in ours]
    named = [file for file in [*files, *(ROOT / "configs").rglob("*.py")] if "research/" in file.read_text()]
    assert named == []


def test_it_is_in_no_wheel():
    packages = find_packages(str(ROOT), include=["mapet_mm*"])
    assert "mapet_mm" in packages
    links = [path.resolve() for path in (ROOT / "mapet_mm/.mim").iterdir()]
    assert links
    assert not [path for path in links if path.is_relative_to(ROOT / "research")]
    assert 'include = ["mapet_mm*"]' in (ROOT / "pyproject.toml").read_text()
