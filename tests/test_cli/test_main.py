"""`mapet-mm COMMAND` starts the command's tool, from a clone or a wheel."""

import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

from mapet_mm import __version__
from mapet_mm.cli.main import JOBS, PACKAGE, main
from mapet_mm.dependencies import LIBRARIES
from mapet_mm.engine.runners.launch import load_config
from mapet_mm.utils.commands import TOOLS

TOOL = str(PACKAGE / "tools/train.py")


@pytest.fixture
def started(monkeypatch) -> list[list[str]]:
    """The commands that replaced the process."""
    commands: list[list[str]] = []
    monkeypatch.setattr("os.execve", lambda _, command, environment: commands.append(command))
    return commands


def test_a_command_becomes_its_tool(started):
    main(["train", "CONFIG", "--amp"])
    main(["--processes", "2", "train", "CONFIG"])
    main(["--processes", "2", "extract-tokens", "CONFIG"])
    torchrun = [str(PACKAGE / "tools/torchrun.py"), "--standalone", "--nproc_per_node=2"]
    assert started == [
        [sys.executable, TOOL, "CONFIG", "--amp"],
        [sys.executable, *torchrun, TOOL, "CONFIG", "--launcher", "pytorch"],
        [sys.executable, *torchrun, str(PACKAGE / "tools/extract_tokens.py"), "CONFIG"],
    ]


HELP = """
import os, runpy, sys
from mapet_mm.cli.main import JOBS, main
from mapet_mm.utils.commands import TOOLS

def run_here(program, command, environment):
    sys.argv = command[1:]
    sys.path.insert(0, os.path.dirname(command[1]))
    runpy.run_path(command[1], run_name="__main__")

os.execve = run_here
for words in ([], *([name] for name in (*JOBS, *TOOLS))):
    print("\\n## help of", *words)
    try:
        main([*words, "--help"])
    except SystemExit as end:
        assert not end.code
    assert "torch" not in sys.modules, words
"""


def test_help_is_there_at_once():
    """No command imports PyTorch, which takes seconds, before it has read its arguments."""
    command = [sys.executable, "-W", "ignore", "-c", HELP]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tools/" not in done.stdout.replace("tools/dist_", "").replace("tools/slurm_", "")
    _, *helps = done.stdout.split("\n## help of")
    shown = dict(text.split("\n", 1) for text in helps)
    assert [name.strip() for name in shown] == ["", *JOBS, *TOOLS]
    for name, text in shown.items():
        assert text.startswith(f"usage: mapet-mm{name.rstrip()}")
    assert all(f"\n  {name} " in shown[""] for name in (*JOBS, *TOOLS))


def test_the_versions_of_all_libraries_are_one_block(capsys):
    main(["--version"])
    versions = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert versions["mapet_mm"] == __version__
    assert versions["torch"] == f"torch {version('torch')}"
    assert versions["mmengine"].rpartition(" ")[0] in LIBRARIES["mmengine"]
    assert versions["CUDA"].startswith(torch.version.cuda or "none")
    assert {"Python", "mmcv", "mmpretrain", "mmseg", "timm", "open_clip", "faiss"} <= versions.keys()


@pytest.mark.parametrize("job", JOBS)
def test_a_job_of_several_stages_runs_in_this_process(job, started, monkeypatch):
    given = []
    monkeypatch.setattr(f"mapet_mm.cli.{job}.main", given.append)
    main(["--processes", "2", job, "DIR", "--epochs", "3"])
    assert given == [["DIR", "--epochs", "3", "--processes", "2"]]
    assert not started


def test_a_mistyped_command_is_refused_in_one_line():
    with pytest.raises(SystemExit, match="no command 'pretrian': pretrain, finetune,"):
        main(["pretrian"])


def test_recipes_are_found_without_a_clone(monkeypatch, tmp_path):
    """By the path that they have in one; a file of that name in the working folder comes first."""
    monkeypatch.chdir(tmp_path)
    recipe = "configs/mapet/mapet_vit-tiny-p16_kclip_16xb128-amp-coslr-300e_in1k.py"
    cfg = load_config(recipe)
    assert cfg.model.backbone.arch == "deit-tiny"
    assert cfg.work_dir == "work_dirs/mapet_vit-tiny-p16_kclip_16xb128-amp-coslr-300e_in1k"
    (tmp_path / recipe).parent.mkdir(parents=True)
    (tmp_path / recipe).write_text("model = dict(mine=True)")
    assert load_config(recipe).model == dict(mine=True)
    with pytest.raises(FileNotFoundError, match=r"mapet/none\.py"):
        load_config("configs/mapet/none.py")


@pytest.mark.parametrize("count", ["0", "-1", "two", ""])
def test_a_number_of_processes_that_cannot_be_is_refused_in_one_line(count):
    with pytest.raises(SystemExit, match=f"error: --processes {count}: how many"):
        main(["--processes", count, "train", "config.py"])
