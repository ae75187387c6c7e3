"""Stages run in order and in parallel, stop when one fails or the demo is told to, and continue."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from demo_stages import Stage, run_stages

from mapet_mm.utils.errors import UserError

# Notes when it starts and ends in a file of all stages, and writes its output.
TOOL = """
import sys, time
name, seconds, code = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
def note(what):
    with open("events", "a") as file:
        file.write(f"{name} {what}\\n")
note("starts")
print("says", name)
time.sleep(seconds)
if code:
    sys.exit(code)
open(f"{name}.out", "w").close()
note("ends")
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tool.py").write_text(TOOL)


def stage(name, seconds=0.0, code=0, needs=()):
    output = Path(f"{name}.out")
    return Stage(name, Path("out", name), ["tool.py", name, str(seconds), str(code)], output, needs)


def events():
    return Path("events").read_text().splitlines()


def test_a_stage_waits_for_what_it_needs_while_another_runs(capsys):
    first = stage("first", 0.5)
    stages = [first, stage("second", needs=[first]), stage("third")]
    run_stages(stages, jobs=2)
    assert events().index("first ends") < events().index("second starts")
    assert events().index("third starts") < events().index("first ends")
    assert [one.is_done for one in stages] == [True] * 3
    assert "[ 2/3] python tool.py second 0.0 0\n" in capsys.readouterr().out


def test_one_job_at_a_time_runs_them_in_order():
    run_stages([stage("first", 0.2), stage("second")], jobs=1)
    assert events() == ["first starts", "first ends", "second starts", "second ends"]


def test_done_stages_are_skipped_and_those_that_lost_their_output_are_not(capsys):
    stages = [stage("first"), stage("second")]
    run_stages(stages, jobs=1)
    Path("second.out").unlink()
    Path("events").unlink()
    run_stages(stages, jobs=1)
    assert events() == ["second starts", "second ends"]
    assert "1 of 2 stages were done before" in capsys.readouterr().out


def test_a_failure_shows_its_log_and_ends_the_others():
    stages = [stage("fails", 0.3, code=3), stage("long", 60), stage("never")]
    started = time.monotonic()
    with pytest.raises(UserError, match="fails") as error:
        run_stages(stages, jobs=2)
    assert "out/fails/run.log" in str(error.value)
    assert "ended with code 3" in str(error.value)
    assert "  | says fails\n" in str(error.value)
    assert time.monotonic() - started < 30
    assert stages[1].process.returncode == -signal.SIGTERM
    assert not any(one.is_done for one in stages)
    assert "never starts" not in events()


def test_a_command_that_writes_nothing_is_not_done():
    quiet = stage("quiet")
    quiet.output = Path("other.out")
    with pytest.raises(UserError, match=r"did not write other\.out"):
        run_stages([quiet], jobs=1)


def test_ctrl_c_ends_the_running_stage_and_the_next_run_continues():
    first, second, third = stage("first"), stage("second", 60), stage("third")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt():
        while not Path("events").is_file() or "second starts" not in events():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=interrupt)
    try:
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            run_stages([first, second, third], jobs=1)
    finally:
        presser.join()
        signal.signal(signal.SIGINT, before)
    assert second.process.returncode == -signal.SIGTERM
    run_stages([first, stage("second"), third], jobs=1)
    assert events() == [
        *("first starts", "first ends", "second starts"),
        *("second starts", "second ends", "third starts", "third ends"),
    ]


def test_an_interrupted_evaluation_starts_anew_and_its_last_value_counts():
    measured = stage("measured")
    measured.metric = "accuracy"
    log = Path("out/measured/1/vis_data/scalars.json")
    log.parent.mkdir(parents=True)
    log.write_text('{"accuracy": 1.0, "step": 1}\n')  # of the interrupted one
    Path("tool.py").write_text(
        f"""
from pathlib import Path
log = Path("{log}")
assert not log.exists()
log.parent.mkdir(parents=True)
log.write_text('{{"accuracy": 2.0, "step": 1}}\\n{{"accuracy": 3.0, "step": 2}}\\n')
Path("measured.out").touch()
"""
    )
    run_stages([measured], jobs=1)
    assert json.loads(measured.result_file.read_text())["value"] == 3.0
