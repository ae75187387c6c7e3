"""Filling a table: runs done once, killed and resumed, failed ones, results kept. The tools are fake ones."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev

import pytest

from mapet_mm.experiments.declaration import load_table
from mapet_mm.experiments.filling import TableFiller
from mapet_mm.experiments.results import summarise
from mapet_mm.experiments.stages import StageError

# Its "accuracy" follows from config, seed and start, like that of a training; it notes each start.
TRAIN = """
import hashlib, json, pathlib, sys, time
config, work_dir = sys.argv[1], pathlib.Path(sys.argv[3])
options = dict(option.split("=", 1) for option in sys.argv[6:])
with open("starts.txt", "a") as starts:
    starts.write(work_dir.name + "\\n")
if options.get("fail"):
    sys.exit("this one fails")
start = options.get("model.backbone.init_cfg.checkpoint")
text = pathlib.Path(start).read_text() if start else ""
what = [pathlib.Path(config).stem, options["randomness.seed"], text]
value = int(hashlib.sha256(json.dumps(what).encode()).hexdigest()[:4], 16) / 655.36
(work_dir / "1" / "vis_data").mkdir(parents=True, exist_ok=True)
(work_dir / "1" / "vis_data" / "scalars.json").write_text(json.dumps({"accuracy/top1": value, "step": 1}))
time.sleep(0.15)
(work_dir / "epoch_1.pth").write_text(str(value))
"""
TABLE = """
title = "A small table"
data = dict(command=["tools/data.py"], outputs=["data.txt"])
rows = [
    dict(name="scratch"),
    dict(name="one", pretrain="configs/one.py"),
    dict(name="two", pretrain="configs/two.py", options={OPTIONS}),
]
columns = [
    dict(name="probe", unit="%", config="configs/probe.py", metric="accuracy/top1", paper={"one": 50.0}),
    dict(name="tuned", unit="%", config="configs/tuned.py", metric="accuracy/top1"),
]
"""
RUN = """
import sys
from mapet_mm.experiments.declaration import load_table
from mapet_mm.experiments.filling import TableFiller
TableFiller(load_table("small", "digits"), [0, 1], "out", jobs=2, command="the command").run(preload=())
"""


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with tools, configs and a table, and this process in it."""
    for folder in ("tools", "configs/tables/digits"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tools/train.py").write_text(TRAIN)
    (tmp_path / "tools/data.py").write_text("open('data.txt', 'w').write('data')")
    for name in ("one", "two", "probe", "tuned"):
        (tmp_path / f"configs/{name}.py").write_text("train_cfg = dict(max_epochs=1)\n")
    declare(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def declare(project: Path, options: str = "") -> None:
    (project / "configs/tables/digits/small.py").write_text(TABLE.replace("OPTIONS", options))


def filler(seeds: int = 2) -> TableFiller:
    table = load_table("small", "digits")
    return TableFiller(table, range(seeds), "out", jobs=2, command="the command", tell=lambda line: None)


def starts() -> list[str]:
    return sorted(Path("starts.txt").read_text().split())


def cells() -> dict[tuple[str, str], dict[str, str]]:
    """The lines of the CSV, by row and column."""
    with open("out/digits/small.csv") as file:
        return {(line["row"], line["column"]): line for line in csv.DictReader(file)}


def tables() -> tuple[str, str]:
    """Markdown without the line on the time it took, and CSV."""
    markdown = Path("out/digits/small.md").read_text().splitlines()
    return "\n".join(line for line in markdown if "Compute:" not in line), Path(
        "out/digits/small.csv"
    ).read_text()


def test_every_run_is_done_once_and_the_table_says_mean_and_spread(project):
    filler().run(preload=())
    # Two seeds: two pre-trainings and three rows of two evaluations each.
    assert len(starts()) == len(set(starts())) == 2 * (2 + 6)
    rows = cells()
    cell = rows["one", "probe"]
    values = [float(value) for value in cell["values"].split()]
    assert len(values) == 2 == int(cell["seeds"])
    assert float(cell["mean"]) == pytest.approx(mean(values), abs=1e-3)
    assert float(cell["std"]) == pytest.approx(stdev(values), abs=1e-3)
    assert (cell["paper"], cell["missing"]) == ("50.0", "")

    lines = Path("out/digits/small.md").read_text().splitlines()
    assert lines[:4] == [
        "## A small table",
        "",
        "|  | probe (%) | paper | tuned (%) |",
        "| --- | ---: | ---: | ---: |",
    ]
    assert len([line for line in lines if "**" in line]) in (1, 2)
    best = max(("scratch", "one", "two"), key=lambda row: float(rows[row, "probe"]["mean"]))
    line = next(line for line in lines if line.startswith(f"| {best} "))
    assert (
        f"| **{float(rows[best, 'probe']['mean']):.1f}** ± {float(rows[best, 'probe']['std']):.1f} |" in line
    )
    assert "Command: `the command`" in lines[-2]


def test_a_row_is_evaluated_in_its_columns_only(project):
    """A dash in the others, in the table and in the CSV, and nothing is missing."""
    text = (project / "configs/tables/digits/small.py").read_text()
    declared = text.replace('dict(name="scratch")', 'dict(name="scratch", columns=["tuned"])')
    (project / "configs/tables/digits/small.py").write_text(declared)
    one = filler(seeds=1)
    one.run(preload=())
    assert not one.missing
    assert not [name for name in starts() if "probe" in name and "scratch" in name]
    rows = cells()
    assert (rows["scratch", "probe"]["missing"], rows["scratch", "probe"]["seeds"]) == ("-", "0")
    assert rows["scratch", "tuned"]["seeds"] == "1"
    (line,) = (
        line for line in Path("out/digits/small.md").read_text().splitlines() if line.startswith("| scratch ")
    )
    assert line.startswith("| scratch | - |  | ")


def test_a_second_run_does_nothing_and_another_seed_only_its_own(project):
    filler().run(preload=())
    before, written = starts(), tables()
    filler().run(preload=())
    assert starts() == before
    assert tables() == written
    filler(seeds=3).run(preload=())
    new = starts()
    for name in before:
        new.remove(name)
    assert len(new) == 8
    assert all(name.endswith("seed-2") for name in new)


def test_killed_in_the_middle_and_started_again_ends_with_the_same_table(project):
    """SIGKILL of the whole program, several times; nothing that was finished is done again."""
    filler().run(preload=())
    undisturbed = tables()
    subprocess.run(["rm", "-r", "out", "starts.txt", "data.txt"], check=True)

    kills = 0
    while kills < 4:
        process = subprocess.Popen([sys.executable, "-c", RUN], start_new_session=True)
        target = 2 + 3 * kills
        while process.poll() is None and len(starts() if Path("starts.txt").exists() else []) < target:
            time.sleep(0.02)
        assert process.poll() is None, "the run ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        time.sleep(1.2)  # its children end when they notice
    assert subprocess.run([sys.executable, "-c", RUN], env=os.environ).returncode == 0
    assert tables() == undisturbed
    assert len(set(starts())) == 16
    # At most the two that were running were started again after each kill.
    assert len(starts()) <= 16 + 2 * kills


def test_a_failed_run_costs_only_its_own_cells(project):
    declare(project, options="'fail': 'yes'")
    with pytest.raises(StageError, match=r"this one fails(.|\n)*the whole log|The whole log"):
        filler().run(preload=())
    rows = cells()
    assert {name: rows[name, "tuned"]["missing"] for name in ("scratch", "one", "two")} == {
        "scratch": "",
        "one": "",
        "two": "failed",
    }
    assert "4 of 12 results are still missing" in tables()[0]
    declare(project)
    filler().run(preload=())
    assert "missing" not in tables()[0]


def test_results_outlive_the_work_directories(project):
    """Deleted runs are not done again: the results file has them; with another recipe they do not count."""
    filler().run(preload=())
    before, written = starts(), tables()
    subprocess.run(["rm", "-r", "out/digits/runs"], check=True)
    again = filler()
    assert not again.missing
    again.write()
    assert tables() == written
    assert starts() == before

    (project / "configs/probe.py").write_text("train_cfg = dict(max_epochs=1)\nlr = 2\n")
    assert {cell.column for cell in filler().missing} == {"probe (%)"}


def test_spread_is_the_sample_standard_deviation():
    measured = summarise([1.0, 2.0, 4.0])
    assert measured.mean == pytest.approx(7 / 3)
    assert measured.spread == pytest.approx(((16 + 1 + 25) / 9 / 2) ** 0.5)
    assert summarise([3.0]).spread is None
    assert summarise([]) is None
