"""Trainings that are killed again and again end with the weights of one that was not."""

import json
import os
import subprocess
import sys

import pytest
from config_building import ROOT


@pytest.mark.slow
def test_twenty_random_kills_change_no_bit(tmp_path):
    """After steps and in the middle of checkpoint files; autocast, averaged weights, 0 to 2 workers."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "tests/killed_training.py"), str(tmp_path), "20"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert sum(kills for kills, _ in results) >= 20
    assert all(equal for _, equal in results), results
