"""A table filled by jobs of a real Slurm that is disturbed: the table of an undisturbed local run.

python -m pytest tests/slurm -m slow -s        (as root: it starts a Slurm of one node, see start.sh)
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

# Two rows and one seed of the real recipes, shortened.
TABLE = """
_base_ = "../digits.py"

title = "Two rows"
few = {"train_dataloader.dataset.indices": 256}
rows = [dict(_base_.scratch), dict(_base_.mapet, options={"train_cfg.max_epochs": 8, **few})]
columns = [
    dict(name="probe", unit="%", config=_base_.probe, metric="accuracy/top1",
         options={"train_cfg.max_epochs": 3, **few}),
]
"""
COMMAND = [sys.executable, "tools/run_table.py", "short"]
SLURM = [*COMMAND, "--launcher", "slurm", "--sbatch=--partition=cpu"]
FILES = ("tools", "configs/micro", "configs/_base_", "configs/tables/_base_", "configs/tables/digits.py")


def output(*words: str, folder: Path | None = None) -> str:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    print(f"$ {' '.join(words)}\n{done.stdout}{done.stderr}", flush=True)
    assert done.returncode == 0
    return done.stdout


def make_project(folder: Path) -> Path:
    """The repository's recipes and tools, and the table; data and tokens are its own."""
    (folder / "configs/tables/digits").mkdir(parents=True)
    for name in FILES:
        (folder / name).symlink_to(ROOT / name)
    (folder / "configs/tables/digits/short.py").write_text(TABLE)
    return folder


def wait_for(happened: Callable[[], object], seconds: float = 900) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture
def slurm(tmp_path_factory, monkeypatch) -> None:
    folder = tmp_path_factory.mktemp("slurm")
    start = ["bash", str(ROOT / "tests/slurm/start.sh"), str(folder)]
    output(*start)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield
    subprocess.run(["scancel", "--user", "root"])
    subprocess.run([*start, "stop"])


@pytest.mark.usefixtures("slurm")
def test_a_disturbed_cluster_fills_the_table_of_an_undisturbed_local_run(tmp_path):
    here, there = make_project(tmp_path / "local"), make_project(tmp_path / "cluster")
    runs = there / "work_dirs/tables/digits/runs"

    # Two people submit the table at the same moment.
    both = [subprocess.Popen(SLURM, cwd=there, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [line for one in both for line in one.communicate()[0].splitlines() if "submitted" in line]
    assert sorted(int(line.split()[1]) for line in lines) == [0, 6]

    # One job is cancelled, and the process of a training is killed in the middle.
    (scratch,) = runs.glob("vit-micro_*--scratch_seed-0-*")
    output("scancel", (scratch / "job").read_text())
    (pretraining,) = runs.glob("mapet_*_seed-0-*")
    wait_for(lambda: [*pretraining.glob("epoch_*")])
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().decode().split("\0")
        if any(word.endswith("tools/train.py") for word in words[:3]) and str(pretraining.name) in str(words):
            os.kill(int(path.parent.name), signal.SIGKILL)
    wait_for(lambda: not subprocess.run(["squeue", "--noheader"], capture_output=True, text=True).stdout)
    assert not (pretraining / "epoch_8.pth").exists()
    assert "0 of 2 results are there; runs: 3 done, 1 failed, 2 not run" in output(
        *COMMAND, "--collect", folder=there
    )

    # The same command submits what is missing.
    output(*SLURM, folder=there)
    wait_for(lambda: not subprocess.run(["squeue", "--noheader"], capture_output=True, text=True).stdout)
    assert "2 of 2 results are there; runs: 6 done" in output(*COMMAND, "--collect", folder=there)

    # A local run adopts a copy of the data, the codebook and the tokens.
    for name in ("data", "work_dirs/digits"):
        shutil.copytree(there / name, here / name)
    output(*COMMAND, folder=here)
    for name in ("short.csv", "short.md"):
        texts = [(at / "work_dirs/tables/digits" / name).read_text().splitlines() for at in (here, there)]
        one, other = ([line for line in text if "Compute" not in line] for text in texts)
        assert one == other
    ends = (pretraining / "run.log").read_text().count("Saving checkpoint at 8 epochs")
    assert ends == 1, f"trained {ends} times"
