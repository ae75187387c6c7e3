"""Several processes train as one does, and one that dies ends the run soon, with its number and error."""

import json
import os
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from config_building import ROOT
from jittered_training import HOOKS, build, final
from mapet_mm.engine.hooks.stuck_loader_hook import StuckLoaderHook

slow = pytest.mark.slow
# Sums over processes differ in their last bits.
TOLERANCE = dict(rtol=0, atol=2e-5)


def train(folder: Path, processes: int, *options: str) -> subprocess.CompletedProcess:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(ROOT / "tools/torchrun.py"), f"--nproc_per_node={processes}"]
    command += [f"--master_port={port}", str(ROOT / "tests/distributed_training.py"), str(folder), *options]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Work dir of a training in so many processes, with 7 images for validation."""

    @cache
    def folder(processes: int) -> Path:
        path = tmp_path_factory.mktemp("trained") / str(processes)
        done = train(path, processes, "val=7")
        assert done.returncode == 0, done.stderr[-2000:]
        return path

    return folder


def said(folder: Path) -> dict:
    return json.loads((folder / "said.json").read_text())


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], **TOLERANCE)


@slow
@pytest.mark.parametrize("processes", [2, 4])
def test_the_same_batch_in_more_processes_gives_the_same_losses_and_weights(processes, trained):
    alone, together = said(trained(1)), said(trained(processes))
    assert len(alone["losses"]) == 9
    torch.testing.assert_close(
        torch.tensor(together["losses"]), torch.tensor(alone["losses"]), rtol=0, atol=1e-5
    )
    assert_close(final(trained(processes)), final(trained(1)))


@slow
@pytest.mark.parametrize("processes", [2, 4])
def test_validation_counts_each_image_once(processes, trained):
    """7 images are 4 + 3 and 2 + 2 + 2 + 1."""
    for one, other in zip(said(trained(1))["metrics"], said(trained(processes))["metrics"], strict=True):
        assert other == pytest.approx(one, abs=1e-5)


@slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_another_number_of_processes_goes_on_within_the_last_bits(before, after, trained, tmp_path):
    stopped = train(tmp_path / "run", before, "until=4")
    assert stopped.returncode == 75, stopped.stderr[-2000:]
    steps = torch.load(tmp_path / "run/iter_4.pth", weights_only=True)["meta"]["iter"]
    assert steps == 4
    assert train(tmp_path / "run", after, "resume=yes").returncode == 0
    assert_close(final(tmp_path / "run"), final(trained(1)))


@slow
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("killed", ("exitcode  : -9", "Signal 9")),
        ("exception", ("process 1 of 2 ends with an error", "ZeroDivisionError")),
        ("user", ("error: process 1 of 2: the disk is gone",)),
        ("memory", ("process 1 of 2 ends with an error", "allocate")),
        ("stuck", ("error: process 1 of 2: no batch has come for 10 s", "time.sleep(600)")),
    ],
)
def test_a_process_that_dies_ends_the_run_within_a_minute(fault, expected, tmp_path):
    started = time.monotonic()
    done = train(tmp_path / "run", 2, f"fault={fault}", "seconds=10")
    assert done.returncode not in (0, 75)
    found = [text for text in expected if text in done.stdout + done.stderr]
    assert found == [*expected] or (fault == "stuck" and found[:1] == [expected[0]]), done.stderr[-3000:]
    assert time.monotonic() - started < 60 + 40  # 40 s to start, on a busy machine


class Sleepy(torch.utils.data.Dataset):
    """Hangs at an image."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict:
        time.sleep(self.seconds)
        raise OSError("and then fails")


def test_a_loader_that_hangs_ends_its_process_with_a_line(tmp_path, monkeypatch, capfd):
    ended = []
    monkeypatch.setattr("mapet_mm.engine.hooks.stuck_loader_hook.os._exit", ended.append)
    hooks = {**HOOKS, "stuck_loader": dict(type="mapet_mm.StuckLoaderHook", seconds=0.2)}
    runner = build(tmp_path / "run", hooks=hooks, dataset=dict(type=Sleepy, seconds=1.0))
    with pytest.raises(OSError, match="and then fails"):
        runner.train()
    error = capfd.readouterr().err
    assert "error: process 0 of 1: no batch has come for 0.2 s: the loader hangs" in error
    assert "__getitem__" in error
    assert set(ended) == {1}


def test_a_training_that_ended_with_an_error_is_not_taken_for_one_that_hangs(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr("mapet_mm.engine.hooks.stuck_loader_hook.os._exit", ended.append)
    hooks = {**HOOKS, "stuck_loader": dict(type="mapet_mm.StuckLoaderHook", seconds=0.2)}
    runner = build(tmp_path / "run", hooks=hooks, dataset=dict(type=Sleepy, seconds=0.0))
    with pytest.raises(OSError, match="and then fails"):
        runner.train()
    time.sleep(0.5)
    assert ended == []


def test_no_time_at_all_is_refused():
    with pytest.raises(ValueError, match="seconds=0 must be above 0"):
        StuckLoaderHook(0)
