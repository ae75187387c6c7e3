"""A table filled by jobs of a real Slurm that is disturbed: the table of an undisturbed local run.

    python -m pytest tests/slurm -m slow -s        (as root: it starts a Slurm of one node, see start.sh)

`log.txt` beside this file is what it said.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from config_building import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="starts munged, slurmctld and slurmd as root"),
]

# Two rows and two seeds of the real recipes, shortened.
TABLE = """
_base_ = "../digits.py"

title = "Two rows and two seeds"
few = {"train_dataloader.dataset.indices": 256}
rows = [dict(_base_.scratch), dict(_base_.mapet, options={"train_cfg.max_epochs": 8, **few})]
columns = [
    dict(name="probe", unit="%", config=_base_.probe, metric="accuracy/top1",
         options={"train_cfg.max_epochs": 3, **few}),
]
"""
COMMAND = [sys.executable, "tools/run_table.py", "short", "--seeds", "2"]
SLURM = [*COMMAND, "--launcher", "slurm", "--sbatch=--partition=cpu"]
STARTED = time.monotonic()


def say(line: str) -> None:
    print(f"{time.monotonic() - STARTED:6.0f} s  {line}", flush=True)


def run(*words: str, folder: Path | None = None) -> str:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    line = " ".join(words).replace(sys.executable, "python").replace(f"{ROOT}/", "")
    say(f"$ {line}")
    for line in (done.stdout + done.stderr).splitlines()[-4:]:
        say(f"    {line.replace(str(folder), '.')}")
    assert done.returncode == 0
    return done.stdout


def make_project(folder: Path) -> Path:
    """The repository's recipes and tools, and the table; data and tokens are of its own."""
    (folder / "configs/tables/digits").mkdir(parents=True)
    for name in (
        "tools",
        "configs/micro",
        "configs/_base_",
        "configs/tables/_base_",
        "configs/tables/digits.py",
    ):
        (folder / name).symlink_to(ROOT / name)
    (folder / "configs/tables/digits/short.py").write_text(TABLE)
    return folder


def wait_for(what: str, happened: Callable[[], object], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"waited too long: {what}"
        time.sleep(0.2)
    say(what)


def processes_with(text: str) -> list[int]:
    """Processes of tools/train.py whose command line has this text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if any(word.endswith("tools/train.py") for word in words[:2]) and any(text in word for word in words):
            found.append(int(path.parent.name))
    return found


@pytest.fixture
def slurm(tmp_path_factory, monkeypatch) -> Path:
    """The folder of a running Slurm."""
    folder = tmp_path_factory.mktemp("slurm")
    start = ["bash", str(ROOT / "tests/slurm/start.sh"), str(folder)]
    run(*start)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield folder
    subprocess.run(["scancel", "--user", "root"])
    subprocess.run([*start, "stop"])


def test_a_disturbed_cluster_fills_the_table_of_an_undisturbed_local_run(slurm, tmp_path):
    here, there = make_project(tmp_path / "local"), make_project(tmp_path / "cluster")
    runs = there / "work_dirs/tables/digits/runs"

    run(*SLURM, "--dry-run", folder=there)
    say("two people submit the table at the same moment")
    both = [subprocess.Popen(SLURM, cwd=there, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    counts = [line for one in both for line in one.communicate()[0].splitlines() if "submitted" in line]
    say("    " + " | ".join(counts))
    assert sorted(int(line.split()[1]) for line in counts) == [0, 9]

    def folder(part: str) -> Path:
        (found,) = [path for path in runs.iterdir() if path.name.startswith(part)]
        return found

    def job(part: str) -> str:
        return (folder(part) / "job").read_text()

    def state(part: str) -> str:
        return subprocess.run(
            ["squeue", "--noheader", "--format=%T", f"--jobs={job(part)}"], capture_output=True, text=True
        ).stdout.strip()

    scratch_1 = "vit-micro_1xb128-linear-coslr_max_epochs-3_indices-256--scratch_seed-1"
    seed_0, seed_1 = (
        f"mapet_vit-micro_kclip_1xb32-coslr_max_epochs-8_indices-256_seed-{seed}" for seed in "01"
    )
    run("scancel", job(scratch_1))
    say("one job is cancelled: a probe from random weights")

    wait_for("pre-training 0 has done an epoch", lambda: [*folder(seed_0).glob("epoch_*")])
    for process in processes_with(folder(seed_0).name):
        os.kill(process, signal.SIGKILL)
    say("its process is killed in the middle")
    assert not (folder(seed_0) / "epoch_8.pth").exists()
    wait_for("Slurm has ended its job, and those that needed it", lambda: not state(seed_0))

    wait_for("pre-training 1 has done an epoch", lambda: [*folder(seed_1).glob("epoch_*")])
    assert state(seed_1) == "RUNNING"
    slurmd = int((slurm / "slurmd.pid").read_text())
    os.kill(slurmd, signal.SIGKILL)
    say("the node's slurmd is killed")
    run("scontrol", "requeue", job(seed_1))
    time.sleep(2)
    run("slurmd", "-f", str(slurm / "slurm.conf"))
    say("and started again; the job of pre-training 1 was put back into the queue meanwhile")

    run(*COMMAND, "--collect", folder=there)
    say("the same command again submits what is missing")
    run(*SLURM, folder=there)
    wait_for(
        "no job is left",
        lambda: not subprocess.run(["squeue", "--noheader"], capture_output=True, text=True).stdout,
    )
    assert "4 of 4 results are there; runs: 9 done" in run(*COMMAND, "--collect", folder=there)

    for name in ("data", "work_dirs/digits"):
        shutil.copytree(there / name, here / name)
    say("a local run, which adopts a copy of the data, the codebook and the tokens")
    run(*COMMAND, folder=here)
    for name in ("short.csv", "short.md"):
        lines = [
            [
                line
                for line in (at / "work_dirs/tables/digits" / name).read_text().splitlines()
                if "Compute" not in line
            ]
            for at in (here, there)
        ]
        assert lines[0] == lines[1]
    say("the table is the one of a local run:")
    for line in lines[0][:6]:
        say(f"    {line}")

    assert len(list((runs.parent / "results").iterdir())) == 9
    for path in runs.iterdir():
        if path.name.startswith(("mapet", "vit")):
            last = 8 if path.name.startswith("mapet") else 3
            ends = (path / "run.log").read_text().count(f"Saving checkpoint at {last} epochs")
            assert ends == 1, f"{path.name} was trained {ends} times"
    say("each of the six trainings came to its end once")
    shutil.rmtree(tmp_path)
