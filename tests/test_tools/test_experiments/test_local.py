"""Runs on this machine: in order, side by side, one thread each, claimed by one process, with logs."""

import json
import os
import signal
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from experiments.local import LocalRunner, run_job
from experiments.plan import Run, identity
from experiments.records import StageError, claim, is_done, note_seconds, record_of, seconds_of, write_record

SCRIPT = """
import os, sys, time
from pathlib import Path
name, seconds = sys.argv[1:3]
with open("order.txt", "a") as file:
    file.write(f"+{name} ")
print(f"working on {name} with {os.environ['OMP_NUM_THREADS']} thread", flush=True)
time.sleep(float(seconds))
Path(f"{name}.out").write_text(name)
with open("order.txt", "a") as file:
    file.write(f"-{name} ")
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    (tmp_path / "job.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)


def job(name, *needs, seconds=0.0, output=None, command=None, kind="data") -> Run:
    """A run of one output; `{run}` in command and output is its folder."""
    command, before = command or ("job.py", name, str(seconds)), tuple(run.folder for run in needs)
    folder = f"out/runs/{name}-{identity(command, before, 'out/runs/{run}')}"
    words = tuple(word.format(run=folder) for word in command)
    return Run(name, kind, words, ((output or f"{name}.out").format(run=folder),), folder, before)


def order():
    return Path("order.txt").read_text().split()


def test_a_frozen_evaluations_figures_are_its_metrics_and_its_features_are_removed():
    command = ("probe.py", "--out", "{run}")
    run = job("probe", command=command, output="{run}/results.json", kind="evaluation")
    rows = [{"protocol": "k-NN", "setting": "both", "value": 81.25, "unit": "top-1, %"}]
    Path("probe.py").write_text(
        "import json, os, sys\nfrom pathlib import Path\nfolder = Path(sys.argv[2])\n"
        "os.makedirs(folder / 'features/train')\n"
        f"(folder / 'results.json').write_text(json.dumps({{'mim, epoch_16': {rows!r}}}))\n"
    )
    LocalRunner([run]).run()
    assert record_of(run)["metrics"] == {"k-NN, both": 81.25}
    assert sorted(os.listdir(run.folder)) == ["claim", "results.json", "run.log", "seconds"]


def test_runs_wait_for_what_they_need_and_leave_a_log_and_a_record():
    told = []
    first = job("a")
    second = job("b", first)
    LocalRunner([first, second], jobs=2, tell=told.append).run()
    assert order() == ["+a", "-a", "+b", "-b"]
    assert told[0] == "[ 1/2] a: python job.py a 0.0"
    assert Path(first.folder, "run.log").read_text() == "working on a with 1 thread\n"
    assert record_of(second)["needs"] == [first.folder]
    assert sorted(os.listdir("out/results")) == [f"{Path(run.folder).name}.json" for run in (first, second)]


def test_independent_runs_go_side_by_side_up_to_the_number_of_jobs():
    LocalRunner([job("a", seconds=1.0), job("b", seconds=1.0), job("c")], jobs=2).run()
    assert {*order()[:2]} == {"+a", "+b"}
    assert order().index("+c") >= 3


def test_a_run_whose_output_is_gone_or_replaced_is_done_again():
    """Another recipe's codebook does not pass for this one's: the tool looks at it again."""
    run = job("a")
    LocalRunner([run]).run()
    os.utime("a.out", (1, 1))
    assert not is_done(run)
    Path("a.out").unlink()
    assert not is_done(run)
    LocalRunner([run]).run()
    assert order() == ["+a", "-a", "+a", "-a"]


def test_a_failure_costs_what_needs_it_and_nothing_else():
    first = job("a", output="elsewhere.out")
    with pytest.raises(StageError, match=r"did not write elsewhere\.out(.|\n)*`b` was not done: it needs a-"):
        LocalRunner([first, job("b", first), job("c")]).run()
    assert order() == ["+a", "-a", "+c", "-c"]


def test_a_long_run_tells_its_last_line_and_its_seconds_are_those_of_all_starts(monkeypatch):
    """Also of those that were interrupted, here as soon as the run has told its line."""
    run, told = job("a", seconds=1.0), []

    def tell(line: str) -> None:
        told.append(line)
        if "working" in line:
            raise KeyboardInterrupt

    with monkeypatch.context() as often:
        often.setattr("experiments.local.REPORT_SECONDS", 0)
        with pytest.raises(KeyboardInterrupt):
            LocalRunner([run], tell=tell).run()
    assert told[-1] == "[ 1/1] a: working on a with 1 thread"
    assert 0 < seconds_of(run) < 60
    note_seconds(run, 500.0)
    LocalRunner([run]).run()
    assert order() == ["+a", "+a", "-a"]
    assert 501 <= record_of(run)["seconds"] < 560


def test_a_folder_of_runs_may_be_moved():
    """Records name outputs in a run's folder by their places in it."""
    run = job("a", command=("job.py", "{run}/a", "0"), output="{run}/a.out")
    LocalRunner([run]).run()
    assert record_of(run)["made"] == {"a.out": 0}
    os.rename("out", "moved")
    moved = replace(run, folder=(folder := f"moved{run.folder[3:]}"), outputs=(f"{folder}/a.out",))
    assert is_done(moved)
    Path(moved.outputs[0]).unlink()
    assert not is_done(moved)


@pytest.mark.parametrize("text", ["{}", "[]", "", '{"metrics": {}, "made"'])
def test_a_record_that_is_not_whole_is_not_there(text):
    run = job("a")
    LocalRunner([run]).run()
    (file,) = Path("out/results").iterdir()
    file.write_text(text)
    assert record_of(run) is None
    LocalRunner([run]).run()
    assert is_done(run)
    assert order() == ["+a", "-a"] * 2


def test_a_run_that_another_process_does_is_waited_for_and_not_done_again():
    """The other one holds the claim and writes the record; meanwhile this runner does what it can."""
    run, other = job("a"), job("b")
    told: list[str] = []
    with claim(run.folder):
        assert claim(run.folder) is None
        thread = threading.Thread(target=lambda: LocalRunner([run, other], tell=told.append).run())
        thread.start()
        deadline = time.monotonic() + 60
        while not is_done(other) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert order() == ["+b", "-b"]
        Path("a.out").touch()
        write_record(run, 1.0)
    thread.join(60)
    assert order() == ["+b", "-b"]
    assert "[ 1/2] a: another runner is at it" in told
    assert "[ 1/2] a: done by another runner" in told


TOLD = """
import os, signal, sys, time
signal.signal(getattr(signal, sys.argv[1]), lambda *_: sys.exit(int(sys.argv[2])))
os.kill(os.getppid(), getattr(signal, sys.argv[1]))
time.sleep(30)
"""


@pytest.mark.parametrize(
    ("name", "code", "queued"),
    [
        ("SIGUSR1", 75, True),  # the job's time is over
        ("SIGUSR1", 10, True),  # a tool that saves as it goes
        ("SIGTERM", 75, False),  # cancelled, or preempted, which Slurm puts back itself
    ],
)
def test_a_job_whose_time_is_over_ends_its_tool_and_is_requeued(name, code, queued, monkeypatch):
    Path("told.py").write_text(TOLD)
    Path("scontrol").write_text('#!/bin/sh\necho "$@" > scontrol.txt\n')
    Path("scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{os.getcwd()}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    run = job("a", command=("told.py", name, str(code)))
    before = [(number, signal.getsignal(number)) for number in (signal.SIGUSR1, signal.SIGTERM)]
    with pytest.raises(SystemExit) as ended:
        run_job("1", json.dumps(asdict(run)))
    for number, handler in before:
        signal.signal(number, handler)
    assert ended.value.code == 75
    assert Path("scontrol.txt").is_file() == queued
    assert not queued or Path("scontrol.txt").read_text() == "requeue 17\n"
    assert not is_done(run)
    assert not Path(run.folder, "failed").exists()
