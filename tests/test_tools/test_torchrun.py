"""The launcher adds no traceback to the line with which a tool has ended."""

import os
import runpy
import signal
import time

import pytest
from config_building import ROOT
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure


def run_failing(monkeypatch, exit_code: int) -> None:
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=exit_code, error_file="<N/A>")

    def main() -> None:
        raise ChildFailedError("tools/train.py", {0: failure})

    monkeypatch.setattr("torch.distributed.run.main", main)
    runpy.run_path(str(ROOT / "tools/torchrun.py"), run_name="__main__")


@pytest.fixture(autouse=True)
def _own_signals():
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("code", [1, 75])
def test_a_tool_that_has_said_its_error_or_was_told_to_end_ends_with_its_code(monkeypatch, code):
    with pytest.raises(SystemExit) as ended:
        run_failing(monkeypatch, code)
    assert ended.value.code == code


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_run_that_is_told_to_end_passes_it_on_as_torchrun_does_sigterm(monkeypatch, number):
    """torchrun knows no SIGUSR1: it would end at once, and leave its processes behind."""
    before = signal.signal(signal.SIGTERM, lambda told, _: _raise(SignalException("told", told)))

    def main() -> None:
        os.kill(os.getpid(), number)
        time.sleep(10)

    monkeypatch.setattr("torch.distributed.run.main", main)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools/torchrun.py"), run_name="__main__")
    signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 75


def _raise(error: Exception) -> None:
    raise error


def test_a_process_that_was_killed_is_reported(monkeypatch):
    with pytest.raises(ChildFailedError, match=r"tools/train.py FAILED"):
        run_failing(monkeypatch, -9)
