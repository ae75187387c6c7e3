"""Every command on the Markdown pages is one that its program takes.

Commands of this project's tools go through the tool's own parser, and their configs and options exist.
Targets of make, extras and tests are looked up. `OTHERS` are commands of other projects.
"""

import argparse
import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from config_building import ROOT, load
from mmengine.config import Config

from mapet_mm.cli.main import JOBS
from mapet_mm.utils.commands import TOOLS, tool_command

PAGES = [
    page
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "configs/**/*.md", "docker/*.md")
    for page in sorted(ROOT.glob(pattern))
]
# Programs of others, which are not here or would fetch something, and why their commands are not looked at.
OTHERS = {
    "apt-get": "the distribution's",
    "bash tools/build_mmcv.sh": "compiles for minutes",
    "docker ": "there is no Docker",
    "mim": "OpenMMLab's own tools, by the names that its packages give them",
    "pre-commit": "installs hooks into the clone",
    "pip install --dry-run openmim": "another project's",
    "pip install grad-cam": "another project's",
    "pip install openmim": "another project's",
    "pip wheel": "pip's own",
    "python $TOOLS/": "MMPretrain's",
    "python -m mapet_mm.cli.options": "takes no arguments; a test of pages compares what it prints",
    "python -m mapet_mm.visualization.attention_masks": "takes a file's name; a test of its own draws",
    "python -m mapet_mm.visualization.verdict": "takes a folder and a file's name; a test of its own draws",
    "python research/recompute.py": "takes no arguments, and a minute; a test of research/ runs it",
    "srun --pty": "Slurm's own",
    "snakemake": "a set-up of its own, see research/README.md",
    "$SNAKEMAKE": "a set-up of its own, see research/README.md",
    "tensorboard": "another project's",
    "uv": "another project's",
}
JOB_FILES = {ROOT / f"mapet_mm/cli/{name}.py": name for name in JOBS}
TOOL = re.compile(r"\b(tools|research)/(?!tools/)[\w/]+\.py$")
CHOSEN = re.compile(r"/my_|\.\.\.$")  # configs that a reader writes or chooses
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
STARTS = re.compile(
    r"([A-Z_]+=\S+ )*"
    r"(python|bash|torchrun|srun|make|mapet-mm|mim|pip|docker|uv|pre-commit|tensorboard|apt-get) "
)
ALONE = re.compile(
    r"python (tools|research)/\S+\.py|mapet-mm [\w-]+|pip install"
)  # a name, without arguments


def commands(page: Path) -> list[str]:
    """Each command of a page on one line, its variables replaced."""
    text = page.read_text()
    blocks = [block for _, language, block in FENCE.findall(text) if language == "bash"]
    text = FENCE.sub("", text)
    blocks += re.findall(r"(?:^    \S.*\n(?:^     +.*\n)*)", text, re.MULTILINE)
    blocks += [re.sub(r"\s+", " ", code) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    found, variables = [], {}
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        line = line.strip()
        if assigned := re.fullmatch(r"([A-Z]+)=(\S+)", line):
            variables[assigned[1]] = assigned[2]
        elif STARTS.match(line) and not ALONE.fullmatch(line):
            found.append(re.sub(r"\$([A-Z]+)\b", lambda name: variables.get(name[1], name[0]), line))
    return found


CASES = [(page, command) for page in PAGES for command in commands(page)]


class Parsed(BaseException):
    """Carries what a tool's own parser made of a command line; no tool catches it."""


def parse(tool: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Start a tool up to the point where it has parsed its arguments."""
    parse_args = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, words: list[str] | None = None, *_) -> None:
        raise Parsed(parse_args(parser, words))

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "argv", [str(tool), *arguments])
        patch.syspath_prepend(str(tool.parent))
        with pytest.raises(Parsed) as parsed:
            run(tool, arguments)
    return parsed.value.args[0]


def run(tool: Path, arguments: list[str]) -> None:
    """What the command does with a tool."""
    if tool in JOB_FILES:
        importlib.import_module(f"mapet_mm.cli.{JOB_FILES[tool]}").main(arguments)
    else:
        runpy.run_path(str(tool), run_name="__main__")


def tool_and_arguments(words: list[str], stand_in: str) -> tuple[Path, list[str]]:
    """The tool that a command starts, through whatever launcher, and its arguments."""
    if any(re.fullmatch(r"tools/\w+\.sh", word) for word in words):  # prints what it would start
        environment = {**os.environ, "PYTHON": "echo", "PATH": f"{stand_in}:{os.environ['PATH']}"}
        command = words[words.index("bash") :]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
        words = done.stdout.split()
    if "mapet-mm" in words:
        name, *arguments = words[words.index("mapet-mm") + 1 :]
        if name == "--processes":
            _, name, *arguments = arguments
        if name in JOBS:
            return ROOT / f"mapet_mm/cli/{name}.py", arguments
        words = tool_command(name, arguments)
    place = max(place for place, word in enumerate(words) if TOOL.search(word))
    return ROOT / TOOL.search(words[place])[0], words[place + 1 :]


def check_configs(parsed: argparse.Namespace) -> None:
    """Configs are there, options change entries whose parents they have, and tables exist."""
    named = [getattr(parsed, "config", None) or "", *getattr(parsed, "configs", [])]
    for pattern in (name for name in named if name.startswith("configs/") and not CHOSEN.search(name)):
        files = list(ROOT.glob(pattern))
        assert files, f"there is no {pattern}"
        for option in getattr(parsed, "cfg_options", None) or {}:
            entry: object = load(files[0])
            for part in option.split(".init_cfg.")[0].split(".")[:-1]:
                entry = entry[int(part) if isinstance(entry, list) else part]
            assert isinstance(entry, (Config, dict, list)), f"{pattern} has no entry for {option}"


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory) -> str:
    """A folder with an `srun` that prints its arguments."""
    srun = tmp_path_factory.mktemp("bin") / "srun"
    srun.write_text('#!/bin/sh\necho "$@"\n')
    srun.chmod(0o755)
    return str(srun.parent)


@pytest.mark.parametrize(
    ("page", "command"),
    CASES,
    ids=lambda case: case.stem if isinstance(case, Path) else case[:60],
)
def test_every_command_is_one_that_its_program_takes(page, command, monkeypatch, stand_in):
    words = shlex.split(command, comments=True)
    if command.startswith(tuple(OTHERS)):
        return
    if words[0] == "make":
        targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
    elif words[:2] == ["pip", "install"]:
        extras = re.search(r"\[(.*)\]", words[-1])[1].split(",")
        assert set(extras) <= set(re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.M))
    elif words[:3] == ["python", "-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words[3:] if "/" in word)
    elif scripts := [word for word in words if re.fullmatch(r"tools/benchmarks/\w+\.sh", word)]:
        assert all((ROOT / script).is_file() for script in scripts)  # test_gpu_benchmarks.py runs them
    elif words[:2] == ["python", "-c"]:
        module, name = re.search(r"(mmpretrain|mmseg\.apis)\.([A-Z]\w+)", words[2]).groups()
        assert hasattr(importlib.import_module(module), name)
        compile(words[2], "page", "exec")
    elif command != "mapet-mm --help":
        tool, arguments = tool_and_arguments(words, stand_in)
        check_configs(parse(tool, arguments, monkeypatch))


def test_the_page_of_commands_says_of_each_what_it_does():
    page = (ROOT / "docs/cli.md").read_text()
    rows = dict(re.findall(r"^\| \[`([\w-]+)`\]\(#[\w-]+\) \| (.+) \|$", page, re.MULTILINE))
    assert rows == {**JOBS, **{name: purpose for name, (_, purpose) in TOOLS.items()}}
