"""Stages of a job: each runs in the job's folder, a failure ends it, and signals are passed on."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from mapet_mm.cli import pretrain
from mapet_mm.cli.stages import Stage, claim, run_stages
from mapet_mm.utils.commands import next_line
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.signals import SIGNALS

pytestmark = pytest.mark.usefixtures("signals_given_back")


def stage(title: str, code: str) -> Stage:
    return Stage(title, [sys.executable, "-c", code], f"tool {title}")


def run(folder: Path, *made: Stage) -> None:
    with claim(folder, "pretrain") as held:
        run_stages(made, folder, held)


def test_stages_run_in_the_folder_and_the_first_that_fails_ends_the_job(tmp_path, capfd):
    making = stage("first", "open('made', 'a').write('x')")
    failing = stage("the second", "print('working'); raise SystemExit(3)")
    with pytest.raises(UserError, match="the second: exit code 3"):
        run(tmp_path, making, failing, making)
    assert (tmp_path / "made").read_text() == "x"
    printed = capfd.readouterr().out.splitlines()
    assert [line.partition(" in 0")[0] for line in printed] == [
        "[1/3] first: tool first",
        "[1/3] first: done",
        "[2/3] the second: tool the second",
        "working",
    ]


def test_tools_name_a_next_command_unless_a_job_goes_on_by_itself(tmp_path, capfd):
    code = "from mapet_mm.utils.commands import next_line; print('wrote it' + next_line('mapet-mm train'))"
    run(tmp_path, stage("tokens", code))
    assert "next" not in capfd.readouterr().out
    assert next_line("mapet-mm train") == "\nnext: mapet-mm train"


TRAINING = """
import signal, sys, time
def save(*_):
    time.sleep(0.5)
    print("saved iter_7.pth")
    sys.exit(75)
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, save)
open("started", "w").close()
time.sleep(60)
"""


def test_a_stage_that_was_stopped_is_no_failure(tmp_path, capfd):
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, stage("training", "print('stopped after step 7'); raise SystemExit(75)"))
    assert ended.value.code == 75
    assert capfd.readouterr().out.splitlines()[-1] == "stopped after step 7"


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_passed_on_and_the_stage_saves(number, tmp_path, capfd):
    def tell() -> None:
        while not (tmp_path / "started").exists():
            time.sleep(0.05)
        with pytest.raises(UserError, match="another `mapet-mm pretrain` is at work"):
            claim(tmp_path, "pretrain")
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=tell)
    thread.start()
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, stage("training", TRAINING), stage("export", "print('exported')"))
    thread.join()
    assert ended.value.code == 75
    assert capfd.readouterr().out.splitlines()[-1] == "saved iter_7.pth"
    claim(tmp_path, "pretrain").close()  # nothing is at work any more


@pytest.mark.parametrize("start", ["", "signal.signal(signal.SIGUSR1, lambda *_: os._exit(1))"])
def test_a_stage_that_dies_of_the_signal_that_was_passed_on_is_no_failure(start, tmp_path, capfd):
    """Codebook and tokens take no signals; they go on from what they have written."""
    tell = f"os.kill({os.getpid()}, signal.SIGUSR1); time.sleep(60)"
    telling = f"import os, signal, time\n{start}\n{tell}"
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, stage("tokens", telling))
    assert ended.value.code == 75
    assert capfd.readouterr().out.splitlines()[-1] == "stopped. Run the same command again to continue."


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_between_the_stages_ends_pretrain_with_the_same_code(number, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain, "pretrain", lambda args: signal.raise_signal(number))
    with pytest.raises(SystemExit) as ended:
        pretrain.main([str(tmp_path), "--out", str(tmp_path / "run")])
    assert ended.value.code == 75


def test_a_stage_that_another_signal_killed_is_a_failure(tmp_path):
    dying = "import os; os.kill(os.getpid(), 9)"
    with pytest.raises(UserError, match="tokens: exit code -9"):
        run(tmp_path, stage("tokens", dying))


@pytest.mark.parametrize("has_gpu", [True, False])
def test_on_cpus_stages_keep_the_memory_that_they_free(has_gpu, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("mapet_mm.utils.commands.GPU", str(tmp_path if has_gpu else tmp_path / "none"))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "3")  # the user's own counts
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    names = ("MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_")
    run(tmp_path, stage("tokens", f"import os; print([os.environ.get(name) for name in {names}])"))
    kept = None if has_gpu else "2147483647"
    assert str(["3", kept]) in capfd.readouterr().out
