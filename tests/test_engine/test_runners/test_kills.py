"""Trainings that are killed again and again end with the weights of one that was not."""

import json

import pytest
from forked_processes import ROOT, run_python


@pytest.mark.slow
def test_twenty_random_kills_change_no_bit(tmp_path):
    """After steps and in the middle of checkpoint files; autocast, averaged weights, 0 to 2 workers."""
    done = run_python(ROOT / "tests/killed_training.py", tmp_path, 20)
    results = json.loads(done.splitlines()[-1])
    assert sum(kills for kills, _ in results) >= 20
    assert all(equal for _, equal in results), results
