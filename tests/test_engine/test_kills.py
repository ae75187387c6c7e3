"""Processes that are killed, one after the other, end with the weights of one that was not."""

import os
import signal
import subprocess
import sys

import pytest
from config_building import ROOT
from jittered_training import final, same

NEVER = 99


def train(folder, step: int, where: str, *options: str) -> int:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "tests/killed_training.py"), str(folder), str(step), where]
    return subprocess.run([*command, *options], env=environment, capture_output=True).returncode


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("compiled",)], ids=["eager", "compiled"])
def test_killed_again_and_again_it_ends_where_an_undisturbed_run_does(options, tmp_path):
    """After steps and in the middle of checkpoint files; autocast, accumulation, EMA, 0 to 2 workers."""
    assert train(tmp_path / "whole", NEVER, "step", *options) == 0
    for step, where in ((1, "step"), (3, "writing"), (5, "step"), (6, "writing"), (8, "step")):
        assert train(tmp_path / "parts", step, where, *options) == -signal.SIGKILL
    assert train(tmp_path / "parts", NEVER, "step", *options) == 0
    assert same(final(tmp_path / "whole"), final(tmp_path / "parts"))
