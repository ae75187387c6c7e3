"""The shell tools pass their arguments on, and tools/torchrun.py ends without a traceback of its own."""

import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from config_building import ROOT, read
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from mapet_mm.utils.signals import SIGNALS

TOOLS = ROOT / "tools"
IMAGENET = ROOT / "configs/_base_/datasets/imagenet_tokens.py"

pytestmark = pytest.mark.usefixtures("signals_given_back")


def run_failing(monkeypatch, code: int) -> None:
    """Run the tool while the second of two processes ends with an exit code, or by a signal."""

    def main() -> None:
        failure = ProcessFailure(local_rank=1, pid=1, exitcode=code, error_file="")
        raise ChildFailedError("tools/train.py", {1: failure})

    monkeypatch.setattr("torch.distributed.run.main", main)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    runpy.run_path(str(TOOLS / "torchrun.py"), run_name="__main__")


@pytest.mark.parametrize("code", [1, 75])
def test_a_tools_own_exit_code_is_passed_on(monkeypatch, code):
    with pytest.raises(SystemExit) as ended:
        run_failing(monkeypatch, code)
    assert ended.value.code == code


def test_a_process_that_was_killed_is_reported(monkeypatch):
    with pytest.raises(ChildFailedError, match=r"tools/train.py FAILED"):
        run_failing(monkeypatch, -9)


FAILING = """
import os
from mapet_mm.utils.errors import UserError, one_line_errors

def main():
    line = os.environ["OMP_NUM_THREADS"] + " " + os.environ["MKL_NUM_THREADS"]
    os.write(1, line.encode() + b"\\n")  # at once and in one piece, as the other process writes as well
    raise UserError("no such file")

one_line_errors(main)()
"""


@pytest.mark.parametrize("asked", [None, "3"])
def test_an_error_of_all_processes_is_one_line_and_each_has_its_share_of_the_cores(asked, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    command = [sys.executable, TOOLS / "torchrun.py", "--standalone", "--nproc_per_node=2", "failing.py"]
    threads = dict(OMP_NUM_THREADS=asked) if asked else {}
    others = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    failed = subprocess.run(command, cwd=tmp_path, env=others | threads, capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr == "error: no such file\n"
    share = asked or max(1, len(os.sched_getaffinity(0)) // 2)
    assert f"{share} {share}" in failed.stdout.splitlines()


TRAINING = """
import os, signal, sys, time
from pathlib import Path

def save(number, frame):
    time.sleep(1)
    Path(f"saved{os.environ['RANK']}").touch()
    sys.exit(75)

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, save)
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
    signal.signal(signal.SIGHUP, save)
Path(f"ready{os.environ['RANK']}").touch()
time.sleep(60)
"""


def start_training(folder: Path, script: str = TRAINING, **options) -> subprocess.Popen:
    """Two processes under the tool that have begun."""
    (folder / "training.py").write_text(script)
    command = [sys.executable, TOOLS / "torchrun.py", "--standalone", "--nproc_per_node=2", "training.py"]
    started = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, **options)
    while len(list(folder.glob("ready*"))) < 2 and started.poll() is None:
        time.sleep(0.05)
    return started


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_passed_on_and_the_processes_answer(number, tmp_path):
    """Also twice, as when Slurm or a terminal signals all processes."""
    training = start_training(tmp_path)
    training.send_signal(number)
    time.sleep(0.2)
    training.send_signal(number)
    _, said = training.communicate(timeout=60)
    assert training.returncode == 75
    assert "Traceback" not in said
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved0", "saved1"]


def test_nohup_keeps_the_processes_when_their_terminal_closes(tmp_path):
    ignore = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    training = start_training(tmp_path, preexec_fn=ignore)
    training.send_signal(signal.SIGHUP)
    time.sleep(1.5)
    assert not list(tmp_path.glob("saved*"))
    training.send_signal(signal.SIGTERM)
    assert training.wait(60) == 75


def test_processes_that_a_signal_kills_are_not_taken_for_saved(tmp_path):
    dying = TRAINING.replace("sys.exit(75)", "signal.signal(number, 0); signal.raise_signal(number)")
    training = start_training(tmp_path, dying)
    training.send_signal(signal.SIGTERM)
    _, said = training.communicate(timeout=60)
    assert training.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in said


@pytest.mark.slow
def test_processes_that_hang_end_after_a_further_signal(tmp_path):
    """Not after one: torchrun's thirty seconds are too short for slow steps and large checkpoints."""
    training = start_training(tmp_path, TRAINING.replace("time.sleep(1)", "time.sleep(300)"))
    training.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        training.wait(35)
    training.send_signal(signal.SIGTERM)
    assert training.wait(60) not in (0, 75)


def run_script(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [shutil.which("bash"), str(TOOLS / name), *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)


def echo(path) -> str:
    """A program that prints its arguments, one a line."""
    path.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_the_tool_of_several_processes_passes_whole_arguments_on(tmp_path):
    arguments = ["config.py", "2", "--work-dir", "work dir", "--cfg-options", "a=[1, 2]"]
    done = run_script("dist_train.sh", *arguments, PYTHON=echo(tmp_path / "python"), PORT="4321")
    lines = done.stdout.splitlines()
    assert {"--nproc_per_node=2", "--master_port=4321"} <= set(lines)
    after = ["config.py", "--work-dir", "work dir", "--cfg-options", "a=[1, 2]", "--launcher", "pytorch"]
    assert lines[lines.index(str(TOOLS / "train.py")) + 1 :] == after


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, ("--ntasks=8", "--ntasks-per-node=8", "--gres=gpu:8")),
        ({"GPUS": "16"}, ("--ntasks=16", "--ntasks-per-node=8", "--gres=gpu:8")),
        ({"GPUS": "2"}, ("--ntasks=2", "--ntasks-per-node=2", "--gres=gpu:2")),
        ({"GPUS": "8", "GPUS_PER_NODE": "4"}, ("--ntasks=8", "--ntasks-per-node=4", "--gres=gpu:4")),
    ],
)
def test_the_slurm_tool_starts_srun_with_gpus_and_passes_arguments_on(environment, asked, tmp_path):
    """With as many cores for each GPU as the recipes' loaders have workers."""
    echo(tmp_path / "srun")
    arguments = ["part", "job", "config.py", "work dir", "--resume", "--cfg-options", "a=[1, 2]"]
    path = f"{tmp_path}:{os.environ['PATH']}"
    lines = run_script(
        "slurm_train.sh", *arguments, PATH=path, PYTHON="py", **environment
    ).stdout.splitlines()
    workers = read(IMAGENET).train_dataloader.num_workers
    assert {"--partition=part", f"--cpus-per-task={workers}", *asked} <= set(lines)
    after = ["config.py", "--work-dir", "work dir", "--resume", "--cfg-options", "a=[1, 2]"]
    assert lines[lines.index("py") + 3 :] == [*after, "--launcher", "slurm"]


@pytest.mark.parametrize(("has_mmengine", "chosen"), [(False, "set up"), (True, "active")])
def test_shell_tools_take_the_environment_of_make_setup_unless_an_active_one_has_mmengine(
    has_mmengine, chosen, tmp_path
):
    clone = tmp_path / "clone"
    shutil.copytree(TOOLS, clone / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    for name, folder in {"set up": clone / ".venv/bin", "active": tmp_path / "active"}.items():
        folder.mkdir(parents=True)
        python = folder / "python"
        # The question for MMEngine is answered by the exit code alone.
        python.write_text(f'#!/bin/bash\n[ "$1" = -c ] && exit {int(not has_mmengine)}\necho "{name}"\n')
        python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    environment["PATH"] = f"{tmp_path / 'active'}:{environment['PATH']}"
    command = [shutil.which("bash"), str(clone / "tools/dist_train.sh"), "config.py", "2"]
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout.strip() == chosen


@pytest.mark.parametrize("script", ["dist_train.sh", "dist_test.sh", "slurm_train.sh", "slurm_test.sh"])
def test_shell_tools_print_their_usage_when_arguments_are_missing(script):
    done = run_script(script, "config.py")
    assert done.returncode == 2
    assert done.stderr.startswith(f"usage: bash tools/{script} ")


@pytest.mark.parametrize("script", ["slurm_train.sh", "slurm_test.sh"])
def test_slurm_tools_without_slurm_are_one_line(tmp_path, script):
    for program in ("bash", "dirname"):
        (tmp_path / program).symlink_to(shutil.which(program))
    done = run_script(script, "part", "job", "config.py", "work", PATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("error: srun is not here")
    assert script.replace("slurm", "dist") in done.stderr
