"""Stages of a job: each runs in the job's folder, a failure is one line, and SIGTERM is passed on."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mapet_mm.cli import stages
from mapet_mm.cli.stages import Stage, claim, run_stages
from mapet_mm.utils.errors import UserError


def stage(title: str, code: str) -> Stage:
    return Stage(title, [sys.executable, "-c", code], f"tool {title}")


@pytest.fixture(autouse=True)
def _own_signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def run(folder: Path, *made: Stage) -> None:
    with claim(folder) as held:
        run_stages(made, folder, held)


def test_stages_run_in_the_folder_and_a_failure_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # Python would write the error first
    making = stage("first", "open('made', 'a').write('x')")
    failing = stage("the second", "print('working'); raise SystemExit('error: no disk left')")
    with pytest.raises(UserError) as raised:
        run(tmp_path, making, failing, making)
    log = tmp_path / "logs/2-the-second.log"
    assert str(raised.value) == (
        f"the second: no disk left (all it said: {log}; once the cause is corrected, the same command goes "
        "on from here)"
    )
    assert log.read_text() == "working\nerror: no disk left\n"
    assert (tmp_path / "made").read_text() == "x"
    printed = capsys.readouterr().out.splitlines()
    assert [line[:27] for line in printed] == [
        "[1/3] first       tool firs",
        "[1/3] first       done in 0",
        "[2/3] the second  tool the ",
    ]


def test_a_failure_without_a_word_says_its_exit_code(tmp_path):
    with pytest.raises(UserError, match="first: exit code 3 "):
        run(tmp_path, stage("first", "raise SystemExit(3)"))


def test_bars_are_lines_and_everything_is_copied():
    printed = b"fitting\r 10%|#  | 1/10\r 20%|## | 2/10\nd\xc3\xa9j\xc3\xa0 \xff\n\n  last"
    copy = io.BytesIO()
    assert list(stages._lines(io.BufferedReader(io.BytesIO(printed)), copy)) == [
        "fitting",
        "10%|#  | 1/10",
        "20%|## | 2/10",
        "déjà \ufffd",
        "last",
    ]
    assert copy.getvalue() == printed


def test_terminals_see_each_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(stages, "REDRAW_SECONDS", 0.0)
    run(tmp_path, stage("one", "print('[1][10/45]  eta: 1 day, 2:00:05'); print('[1][20/45]  eta: 0:00:33')"))
    assert "[1/1] one  [1][20/45]  eta: 0:00:33" in capsys.readouterr().out


TRAINING = """
import signal, sys, time
def save(*_):
    time.sleep(0.5)
    print("saved iter_7.pth")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
open("started", "w").close()
time.sleep(60)
"""
JOB = f"""
import sys
from pathlib import Path
from mapet_mm.cli.stages import Stage, claim, run_stages
folder = Path(sys.argv[1])
command = [sys.executable, "-c", {TRAINING!r}]
run_stages([Stage("training", command, "train")], folder, claim(folder))
"""


def test_sigterm_is_passed_on_and_what_was_saved_is_told(tmp_path):
    job = subprocess.Popen([sys.executable, "-c", JOB, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "started").exists():
        assert job.poll() is None
        time.sleep(0.05)
    os.kill(job.pid, signal.SIGTERM)
    printed, _ = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGTERM
    assert printed.splitlines()[-1] == "[1/1] training  stopped: saved iter_7.pth"
    with claim(tmp_path) as held:
        assert held is not None  # nothing is at work any more
