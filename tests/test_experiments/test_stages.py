"""Stages run in order and side by side, are skipped when done, resume when killed and fail with their log."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mapet_mm.experiments.stages import Stage, StageError, StageRunner

SCRIPT = """
import sys, time
from pathlib import Path
name, seconds = sys.argv[1], float(sys.argv[2])
with open("order.txt", "a") as file:
    file.write(f"+{name} ")
print(f"working on {name}", flush=True)
time.sleep(seconds)
if name == "broken":
    sys.exit("error: no good")
Path(f"{name}.out").write_text(name)
with open("order.txt", "a") as file:
    file.write(f"-{name} ")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "job.py").write_text(SCRIPT)
    (tmp_path / "recipe.py").write_text("rate = 1\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job(name, needs=(), seconds=0.0, extra=()):
    command = ["job.py", name, str(seconds), *extra]
    return Stage(name, command, [f"{name}.out"], needs=needs)


def run(stages, jobs=2):
    told = []
    StageRunner(stages, "run", jobs, told.append).run()
    return told


def order():
    return Path("order.txt").read_text().split()


def test_stage_waits_for_what_it_needs(folder):
    run([job("a", seconds=0.3), job("b", needs=["a"])])
    assert order() == ["+a", "-a", "+b", "-b"]


def test_independent_stages_run_side_by_side_up_to_the_number_of_jobs(folder):
    run([job("a", seconds=2.0), job("b", seconds=2.0), job("c")], jobs=2)
    assert {*order()[:2]} == {"+a", "+b"}
    assert order().index("+c") >= 3
    Path("order.txt").unlink()
    run([job("d", seconds=0.3), job("e")], jobs=1)
    assert order() == ["+d", "-d", "+e", "-e"]


def test_stage_runs_with_one_thread(folder):
    Path("threads.py").write_text("import torch; print(torch.get_num_threads()); open('t.out', 'w')")
    run([Stage("t", ["threads.py"], ["t.out"])])
    assert Path("run/logs/t.log").read_text().splitlines()[-1] == "1"


def test_command_is_told_and_its_output_is_in_the_log(folder):
    told = run([job("a")])
    assert told[0] == "[ 1/1] a: python job.py a 0.0"
    assert Path("run/logs/a.log").read_text() == "$ python job.py a 0.0\nworking on a\n"


def test_done_stages_are_skipped_until_a_config_changes(folder):
    """Changing a's config runs a again, and b because it builds on a, but not c."""
    stages = [job("a", extra=["recipe.py"]), job("b", needs=["a"]), job("c")]
    run(stages, jobs=1)
    run(stages, jobs=1)
    assert order() == ["+a", "-a", "+b", "-b", "+c", "-c"]
    Path("order.txt").unlink()
    Path("recipe.py").write_text("rate = 2\n")
    run(stages, jobs=1)
    assert order() == ["+a", "-a", "+b", "-b"]


def test_stage_whose_output_is_gone_runs_again(folder):
    run([job("a")])
    Path("a.out").unlink()
    run([job("a")])
    assert Path("a.out").exists()
    assert order() == ["+a", "-a", "+a", "-a"]


def test_outputs_of_another_recipe_are_removed_but_those_of_an_interrupted_run_kept(folder):
    seen = (
        "import sys; from pathlib import Path; out = Path('x.out'); print('found', out.exists()); out.touch()"
    )
    Path("look.py").write_text(seen)
    stage = Stage("x", ["look.py", "recipe.py"], ["x.out"])
    run([stage])
    stamp = json.loads(Path("run/stamps/x.json").read_text())
    stamp.pop("seconds")  # what a kill leaves
    Path("run/stamps/x.json").write_text(json.dumps(stamp))
    run([stage])
    Path("recipe.py").write_text("rate = 2\n")
    run([stage])
    found = [line for line in Path("run/logs/x.log").read_text().splitlines() if line.startswith("found")]
    assert found == ["found False", "found True", "found False"]


def test_failure_shows_the_end_of_the_log_and_stops_the_others(folder):
    stages = [job("slow", seconds=60), job("broken", seconds=0.5), job("after", needs=["broken"])]
    started = time.monotonic()
    with pytest.raises(
        StageError, match=r"`broken` ended with code 1(.|\n)*error: no good(.|\n)*broken\.log"
    ):
        run(stages)
    assert time.monotonic() - started < 20
    assert sorted(order()) == ["+broken", "+slow"]


def test_stage_without_its_output_has_failed(folder):
    stage = Stage("a", ["job.py", "a", "0"], ["elsewhere.out"])
    with pytest.raises(StageError, match=r"did not write elsewhere\.out"):
        run([stage])


def test_unknown_need_and_double_name_are_refused_before_anything_runs(folder):
    with pytest.raises(StageError, match="`b` needs `a`, which does not come before it"):
        run([job("b", needs=["a"]), job("a")])
    with pytest.raises(StageError, match="`a` occurs twice"):
        run([job("a"), job("a")])
    assert not Path("order.txt").exists()


def test_killed_runner_takes_its_stages_along_and_resumes(folder):
    """After SIGKILL of the runner nothing goes on writing, what was done stays done, and the rest runs."""
    main = (
        "from mapet_mm.experiments.stages import Stage, StageRunner\n"
        "stages = [Stage('a', ['job.py', 'a', '0'], ['a.out']),\n"
        "          Stage('b', ['job.py', 'b', '4'], ['b.out'], needs=['a'])]\n"
        "StageRunner(stages, 'run', 1).run()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", main], cwd=folder)
    deadline = time.monotonic() + 60
    while not (Path("order.txt").exists() and "+b" in order()) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(5)
    assert order() == ["+a", "-a", "+b"]
    assert not Path("b.out").exists()
    run(
        [
            Stage("a", ["job.py", "a", "0"], ["a.out"]),
            Stage("b", ["job.py", "b", "4"], ["b.out"], needs=["a"]),
        ]
    )
    assert order() == ["+a", "-a", "+b", "+b", "-b"]
