"""Filling a table: runs done once, killed and resumed, failed ones, results kept. The tools are fake ones."""

import json
import multiprocessing
import shutil
import time
from pathlib import Path
from statistics import mean, stdev

import pytest
from config_building import run_tool
from experiments.local import LocalRunner
from experiments.records import StageError, claim
from fake_project import cells, declare, fill, filler, named, starts, table, write_config, write_project

FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> Path:
    """A project whose table was filled with one seed and then with two; `first` keeps what the first left."""
    folder = tmp_path_factory.mktemp("filled")
    write_project(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        fill([0])
        Path("first.json").write_text(json.dumps([starts(), table()]))
        fill([0, 1])
    return folder


@pytest.fixture
def done(filled, tmp_path, monkeypatch) -> Path:
    """A copy of the filled project, and this process in it."""
    shutil.copytree(filled, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def run_table(monkeypatch, *words: str) -> None:
    run_tool(monkeypatch, "run_table.py", "small", "--out", "out", *words)


def test_every_run_is_done_once_and_the_table_says_mean_and_spread(done):
    # Two seeds: two pre-trainings and three rows of two evaluations each.
    assert starts() == named(filler([0, 1]).plan.runs)
    assert len(starts()) == 2 * (2 + 6)
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
    best = max(("scratch", "one", "two"), key=lambda row: float(rows[row, "probe"]["mean"]))
    line = next(line for line in lines if line.startswith(f"| {best} "))
    assert (
        f"| **{float(rows[best, 'probe']['mean']):.1f}** ± {float(rows[best, 'probe']['std']):.1f} |" in line
    )
    assert "Command: `the command`" in lines[-2]


def test_a_row_is_evaluated_in_its_columns_only(project):
    file = project / "configs/tables/digits/small.py"
    file.write_text(
        file.read_text().replace('dict(name="scratch")', 'dict(name="scratch", columns=["tuned"])')
    )
    fill(rows=["scratch"])
    assert len([name for name in starts() if "scratch" in name]) == 1
    rows = cells()
    assert (rows["scratch", "probe"]["missing"], rows["scratch", "probe"]["seeds"]) == ("-", "0")
    assert rows["scratch", "tuned"]["seeds"] == "1"
    assert any(line.startswith("| scratch | - |  | ") for line in table()[0].splitlines())


def test_a_second_seed_does_only_its_own_runs_and_a_second_call_nothing(done):
    first, _ = json.loads(Path("first.json").read_text())
    new = starts()
    for name in first:
        new.remove(name)
    assert len(new) == 8
    assert all("seed-1" in name for name in new)
    assert filler([0, 1]).needed_runs() == []
    before = table()
    fill([0, 1])
    assert table() == before


def test_killed_in_the_middle_and_started_again_ends_with_the_same_table(project, filled, monkeypatch):
    """SIGKILL of the whole program, twice; nothing that was finished is done again."""
    monkeypatch.setenv("FAKE_SECONDS", "0.3")
    for kills in (0, 1):
        process = FORK.Process(target=fill)
        process.start()
        while process.is_alive() and len(starts()) < 2 + 3 * kills:
            time.sleep(0.02)
        assert process.is_alive(), "the run ended before it could be killed"
        process.kill()
        process.join()
    monkeypatch.delenv("FAKE_SECONDS")
    deadline = time.monotonic() + 10  # what it had started ends with it
    for run in filler().plan.runs:
        while (held := claim(run.folder)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        held.close()
    fill()
    assert list(table()) == json.loads((filled / "first.json").read_text())[1]
    assert set(starts()) == set(named(filler().plan.runs))
    # At most the two that were running were started again after each kill.
    assert len(starts()) <= 8 + 2 * 2


def test_two_runners_of_one_table_do_each_run_once(project, monkeypatch):
    """A second person starts the same table while the first is at it; both end with the whole table."""
    monkeypatch.setenv("FAKE_SECONDS", "0.2")
    runners = [FORK.Process(target=fill, kwargs=dict(rows=["one"])) for _ in range(2)]
    for one in runners:
        one.start()
    for one in runners:
        one.join(120)
        assert one.exitcode == 0
    assert starts() == named(filler().plan.closure(c.run for c in filler().plan.cells if c.row == "one"))
    assert cells()["one", "tuned"]["mean"]


def test_a_failed_run_costs_only_its_own_cells(project):
    declare(project, options="'fail': 'yes'")
    told = []
    with pytest.raises(StageError, match=r"this one fails(.|\n)*The whole log"):
        fill(rows=["two", "scratch"], tell=told.append)
    rows = cells()
    missing = {name: rows[name, "tuned"]["missing"] for name in ("scratch", "one", "two")}
    assert missing == {"scratch": "", "one": "not run", "two": "failed"}
    assert "4 of 6 results are still missing" in table()[0]
    # Whoever looks later sees it as well.
    assert "1 failed" in filler().status()
    assert any("ended with code 1" in line for line in told)


def test_results_outlive_the_work_directories_and_do_not_count_for_another_recipe(done):
    before = table()
    shutil.rmtree("out/digits/runs")
    again = filler([0, 1])
    assert again.needed_runs() == []
    again.write()
    assert table() == before
    write_config(done, "probe", "lr = 2\n")
    missing = {(cell.run.name, cell.column) for cell in again.plan.cells}
    changed = {run.name for run in filler([0, 1]).needed_runs() if run.kind == "evaluation"}
    assert changed == {name for name, column in missing if column == "probe (%)"}


def test_a_stale_training_is_never_the_result_of_a_new_recipe(project, monkeypatch):
    """The evaluation's config changes: it is trained again, although its last checkpoint is there."""

    def value() -> str:
        run_table(monkeypatch, "--rows", "one")
        return cells()["one", "probe"]["mean"]

    first = value()
    write_config(project, "probe", "rate = 2\n")
    second = value()
    assert second != first
    write_config(project, "probe")
    assert value() == first


def test_a_config_that_changes_while_a_table_is_filled_is_not_recorded_as_the_old_one(project):
    planned = filler()
    write_config(project, "one", "rate = 2\n")
    with pytest.raises(StageError, match=r"configs/one\.py was changed after this run was planned"):
        LocalRunner(planned.needed_runs(["one"]), tell=lambda line: None).run()
    assert starts() == []


def test_a_mistyped_metric_costs_its_column(project, monkeypatch):
    declare(project, metric="accuracy/top")
    run_table(monkeypatch, "--rows", "scratch", "one")
    assert cells()["one", "probe"]["missing"] == ""
    assert cells()["one", "tuned"]["missing"] == "no `accuracy/top`"
    before = starts()
    for call in (["--dry-run"], ["--collect"], []):
        run_table(monkeypatch, "--rows", "scratch", "one", *call)
    declare(project)
    run_table(monkeypatch, "--collect")
    assert cells()["one", "tuned"]["missing"] == ""
    assert starts() == before


def test_columns_leave_out_the_runs_of_the_others(project):
    of_column = filler().needed_runs(rows=["one"], columns=["tuned"])
    assert [run.name for run in of_column] == ["data", "one_seed-0", "tuned--one_seed-0"]
    assert len(filler().needed_runs()) == len(filler().needed_runs(columns=["probe", "tuned"])) == 9


def test_a_nan_is_shown_as_one_beside_other_seeds(done):
    (record,) = Path("out/digits/results").glob("probe--scratch_seed-1-*")
    kept = json.loads(record.read_text())
    record.write_text(json.dumps(kept | {"metrics": {"accuracy/top1": float("nan")}}))
    filler([0, 1]).write()
    cell = cells()["scratch", "probe"]
    assert (cell["mean"], cell["std"], cell["seeds"], cell["missing"]) == ("nan", "nan", "2", "")
    assert "| scratch | nan ± nan |" in table()[0]
    assert not any(line.startswith("| scratch | **") for line in table()[0].splitlines())
