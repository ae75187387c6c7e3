"""The Markdown pages."""

import importlib
import inspect
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from config_building import ROOT
from mmpretrain.apis.model import ModelHub
from mmpretrain.registry import MODELS
from private_attributes import TEST_MODULES

import mapet_mm
from mapet_mm.cli.command_options import options_table
from mapet_mm.cli.finetuning.options import FinetuneOptions
from mapet_mm.cli.options import PretrainOptions

RULE = re.compile(r"\|( *:?-+:? *\|)+")
PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md", "configs/**/*.md", "research/**/*.md")
    for path in ROOT.glob(pattern)
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_row_belongs_to_a_table_with_a_head(page):
    """A blank line inside a table leaves rows that are shown as text."""
    for block in re.split(r"\n\s*\n", page.read_text()):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert not rows or RULE.fullmatch("".join(rows[1:2])), f"no head above {rows[0][:80]}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "research" not in page.parts], ids=lambda page: page.stem
)
def test_no_table_has_more_than_six_columns(page):
    """More are cut off on a phone. The long tables of research/ are an appendix."""
    rules = [line for line in page.read_text().splitlines() if RULE.fullmatch(line.strip())]
    assert [rule for rule in rules if rule.count("|") - 1 > 6] == []


LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
CODE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The names that a forge gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_into_the_repository_leads_somewhere(page):
    missing = []
    for file, anchor in LINK.findall(page.read_text()):
        target = page.parent / file if file else page
        if "://" not in file and not (target.exists() and (not anchor or anchor in anchors(target))):
            missing.append(f"{file}#{anchor}")
    assert not missing


FILE = re.compile(
    r"(?<![\w./-])((?:configs|tools|docs|tests|mapet_mm|research)/[\w./-]*\w\.(?:py|sh|md|txt))\b"
)
# Files that a reader is told to write, or that stand for any of their kind.
TO_WRITE = re.compile(r"/my_|blockwise_|NAME|fashion|letters|/(test_)?x\.py")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_is_there(page):
    named = set(FILE.findall(page.read_text())) if page.name != "CHANGELOG.md" else set()
    assert [file for file in sorted(named) if not (ROOT / file).exists() and not TO_WRITE.search(file)] == []


def test_the_site_has_every_page_and_no_other():
    """The navigation is written by hand."""
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)

    def files(entries):
        for entry in entries:
            if isinstance(entry, dict):
                (value,) = entry.values()
                yield from files(value) if isinstance(value, list) else [value]
            else:
                yield entry

    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(files(site["nav"])) == sorted(pages)


MODULE = re.compile(r"^::: (\S+)(?:\n +options:\n +members: \[([\w, ]+)\])?", re.MULTILINE)
API = [
    shown for page in sorted((ROOT / "docs/api").glob("*.md")) for shown in MODULE.findall(page.read_text())
]


@pytest.mark.parametrize(("module", "members"), API)
def test_the_api_pages_show_what_their_modules_have(module, members):
    """Of a module that only imports others, the site would show nothing but its docstring."""
    module = importlib.import_module(module)
    shown = members.split(", ") if members else getattr(module, "__all__", [])
    assert shown
    assert all(getattr(module, name).__doc__ for name in shown)


def test_the_tests_and_modules_that_pages_name_exist():
    """Tests by their file's name alone, modules by their path in the package, also in CONTRIBUTING.md."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"\b(test_\w+\.py)`", page))
    assert len(named) > 15
    assert named <= {
        path.name for folder in ("tests", "research") for path in (ROOT / folder).rglob("test_*.py")
    }
    rooms = "cli|datasets|engine|evaluation|models|structures|tokenizers|utils|visualization"
    modules = re.findall(rf"`((?:{rooms})/[\w/]+\.py)`", page)
    assert len(modules) > 10
    assert [path for path in modules if not (ROOT / "mapet_mm" / path).is_file()] == []


def test_the_newest_releases_are_tried_with_the_tests_of_private_attributes():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    table = page[page.index("## Private attributes") :]
    assert set(re.findall(r"`(test_\w+\.py)`", table)) == TEST_MODULES


def test_the_options_of_pretrain_are_those_of_the_command():
    page = (ROOT / "docs/pretrain.md").read_text()
    assert options_table(PretrainOptions) in page, "`python -m mapet_mm.cli.options` prints the table"


def test_the_options_of_finetune_are_those_of_the_command():
    page = (ROOT / "docs/your_labels.md").read_text()
    assert page.endswith(options_table(FinetuneOptions)), "`python -m mapet_mm.cli.finetuning.options`"


def test_the_readmes_python_runs(monkeypatch):
    """With stand-ins for the weights' download and for the hours of a pre-training."""
    page = (ROOT / "README.md").read_text()
    functions, backbone, weights = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    asked = []
    monkeypatch.setattr("mmpretrain.get_model", lambda name, pretrained: asked.append(name))
    exec(weights, {})
    assert ModelHub.has(asked[0])
    run = SimpleNamespace(verdict=dict(sentence="No gain seen."))
    monkeypatch.setattr(mapet_mm, "pretrain", stand_in(mapet_mm.pretrain, run), raising=False)
    monkeypatch.setattr(mapet_mm, "load", stand_in(mapet_mm.load, (None, None)), raising=False)
    exec(functions, {})
    names: dict = {}
    exec(backbone, names)
    names["backbone"].pop("init_cfg")
    with torch.device("meta"):
        assert MODELS.build(names["backbone"]).out_indices == [3, 5, 7, 11]


def stand_in(function, result):
    """A function of the same arguments that returns this."""

    def called(*args, **kwargs):
        inspect.signature(function).bind(*args, **kwargs)
        return result

    return called


@pytest.mark.parametrize(
    ("repository", "shown"),
    [
        ("https://forge/us/it", "[tables](https://forge/us/it/blob/main/research/README.md#run-a-table)"),
        (None, "tables (`research/README.md`)"),
    ],
)
def test_the_site_has_no_dead_link_out_of_its_pages(repository, shown):
    show = runpy.run_path(str(ROOT / "docs/site_hooks.py"))["on_page_markdown"]
    link = "[tables](../../research/README.md#run-a-table)"
    others = "[k-CLIP](../api/a.md) and ![x](../../y.png)"
    page = SimpleNamespace(file=SimpleNamespace(src_uri="tutorials/cluster.md"))
    made = show(f"{link}, {others}", page, SimpleNamespace(repo_url=repository), files=None)
    assert made == f"{shown}, {others}"


def test_the_released_weights_are_those_of_the_index():
    index = yaml.safe_load((ROOT / "configs/mapet/metafile.yml").read_text())
    released = [model for model in index["Models"] if "Weights" in model]
    rows = re.findall(
        r"^\| . \| \S+ \| (\S+) \| (\S+) \| `(\S+)` \|$",
        (ROOT / "docs/weights.md").read_text(),
        re.MULTILINE,
    )
    assert rows == [
        (
            f"{model['Metadata']['Parameters'] / 1e6:.1f}",
            str(model["Results"][0]["Metrics"]["Top 1 Accuracy (paper)"]),
            model["Weights"],
        )
        for model in released
    ]
    assert len(rows) == 6
