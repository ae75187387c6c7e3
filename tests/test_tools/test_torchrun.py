"""The launcher adds no traceback to the line with which a tool has ended."""

import runpy

import pytest
from config_building import ROOT
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure


def run_failing(monkeypatch, exit_code: int) -> None:
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=exit_code, error_file="<N/A>")

    def main() -> None:
        raise ChildFailedError("tools/train.py", {0: failure})

    monkeypatch.setattr("torch.distributed.run.main", main)
    runpy.run_path(str(ROOT / "tools/torchrun.py"), run_name="__main__")


def test_a_tool_that_has_said_its_error_ends_with_its_code(monkeypatch):
    with pytest.raises(SystemExit) as ended:
        run_failing(monkeypatch, 1)
    assert ended.value.code == 1


def test_a_process_that_was_killed_is_reported(monkeypatch):
    with pytest.raises(ChildFailedError, match=r"tools/train.py FAILED"):
        run_failing(monkeypatch, -9)
