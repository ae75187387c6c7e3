"""Processes that are killed, one after the other, end with the weights of one that was not."""

import json
import os
import signal
import subprocess
import sys

import pytest
from config_building import ROOT
from jittered_training import final, same

KILLS = ("1:step", "3:writing", "5:step", "6:writing", "8:step")
NEVER = "99:step"


def exit_codes(folder, *arguments: str) -> list[int]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "tests/killed_training.py"), str(folder), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("compiled",)], ids=["eager", "compiled"])
def test_killed_again_and_again_it_ends_where_an_undisturbed_run_does(options, tmp_path):
    """After steps and in the middle of checkpoint files; autocast, accumulation, EMA, 0 to 2 workers."""
    assert exit_codes(tmp_path / "whole", NEVER, *options) == [0]
    killed = [-signal.SIGKILL] * len(KILLS)
    assert exit_codes(tmp_path / "parts", *KILLS, NEVER, *options) == [*killed, 0]
    assert same(final(tmp_path / "whole"), final(tmp_path / "parts"))
