"""A table filled by jobs of a real Slurm that is disturbed: the table of an undisturbed run on this machine.

make test-research        as root: it starts a Slurm of one node, see slurm.sh
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from short_table import ROOT, SNAKEMAKE, make_project, shown, snakemake

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("snakemake") is None, reason="needs Snakemake: make test-research"),
    pytest.mark.skipif(os.geteuid() != 0, reason="starts munged, slurmctld and slurmd as root"),
]
SLURM = ["-j10", "--executor", "slurm", "--default-resources", "slurm_partition=cpu", "slurm_account=root"]
SLURM += ["runtime=60", "--slurm-init-seconds-before-status-checks", "5", "--slurm-status-command", "squeue"]
PATIENCE = 1200


@pytest.fixture
def slurm(tmp_path_factory, monkeypatch) -> None:
    folder = tmp_path_factory.mktemp("slurm")
    start = ["bash", str(ROOT / "research/tests/slurm.sh"), str(folder)]
    subprocess.run(start, check=True)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield
    subprocess.run(["scancel", "--user", "root"])
    subprocess.run([*start, "stop"])


def wait_for(happened: Callable[[], object], process: subprocess.Popen) -> None:
    """Wait until something is true, while a process is at work."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.2)


def jobs() -> list[str]:
    """Numbers of the jobs that wait or run."""
    return subprocess.run(
        ["squeue", "--noheader", "--format=%A"], capture_output=True, text=True
    ).stdout.split()


def processes_of(word: str, folder: str) -> list[int]:
    """Processes whose command lines have a tool and a part of a folder's name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if any(one.endswith(word) for one in words[:3]) and folder in " ".join(words):
            found.append(int(path.parent.name))
    return found


@pytest.mark.usefixtures("slurm")
def test_a_disturbed_cluster_fills_the_table_of_an_undisturbed_machine(tmp_path):
    here, there = make_project(tmp_path / "machine"), make_project(tmp_path / "cluster")
    runs = there / "work_dirs/tables/runs"

    # A training's process is killed in the middle: its job fails, and what needs it is not run.
    first = subprocess.Popen(
        [*SNAKEMAKE, *SLURM], cwd=there, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for(lambda: [*runs.glob("mapet_*/epoch_4.pth")], first)
    (pretraining,) = (path.parent for path in runs.glob("mapet_*/epoch_4.pth"))
    for number in processes_of("tools/train.py", pretraining.name):
        os.kill(number, signal.SIGKILL)
    printed, _ = first.communicate(timeout=PATIENCE)
    print(printed)
    assert first.returncode == 1
    assert not (pretraining / "record.json").exists()
    assert "Two rows: 3 of 4 results are there" in printed

    # The same command again; now Snakemake itself is killed while a job runs, and its jobs are cancelled.
    second = subprocess.Popen(
        [*SNAKEMAKE, *SLURM], cwd=there, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for(lambda: processes_of("tools/train.py", pretraining.name), second)
    second.kill()
    second.wait()
    subprocess.run(["scancel", *jobs()], check=True)
    deadline = time.monotonic() + PATIENCE
    while jobs():
        assert time.monotonic() < deadline
        time.sleep(0.5)
    snakemake(there, "--unlock")

    printed = snakemake(there, *SLURM)
    assert "Two rows: 4 of 4 results are there" in printed
    snakemake(here, "-j2")
    assert shown(there) == shown(here)
    log = (pretraining / "run.log").read_text()
    ends = log.count("Saving checkpoint at 8 epochs")
    assert ends == 1, f"trained {ends} times"
