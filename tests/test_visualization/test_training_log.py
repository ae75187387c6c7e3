"""Training logs are read back: last values, curves, resumed and killed runs, damaged files."""

import json

import pytest

from mapet_mm.visualization.curves import curve
from mapet_mm.visualization.training_log import last_values, read_scalars


def train(epoch, step, loss):
    return {"lr": 1e-3, "loss": loss, "epoch": epoch, "iter": step, "step": step}


def val(epoch, accuracy):
    return {"token/accuracy": accuracy, "step": epoch}


def log(work_dir, timestamp, *records, end="\n"):
    file = work_dir / timestamp / "vis_data/scalars.json"
    file.parent.mkdir(parents=True)
    file.write_text("\n".join(map(json.dumps, records)) + end)
    return file


RUN = [train(1, 10, 4.0), train(1, 20, 3.0), val(1, 12.5), train(2, 30, 2.0), val(2, 25.0)]


def test_resumed_run_replaces_what_it_did_again(tmp_path):
    """Killed in epoch 2 and resumed from epoch 1: epoch 2 counts once, with the resumed run's numbers."""
    log(tmp_path, "20260101_000000", *RUN)
    log(tmp_path, "20260101_000100", train(2, 30, 1.0), val(2, 45.0))
    records = read_scalars(tmp_path)
    assert curve(records, "loss") == {1: 3.5, 2: 1.0}
    assert curve(records, "token/accuracy") == {1: 12.5, 2: 45.0}


def test_a_shorter_training_in_the_same_folder_leaves_nothing_of_the_longer_one(tmp_path):
    log(tmp_path, "20260101_000000", *RUN)
    log(tmp_path, "20260101_000100", train(1, 10, 9.0), val(1, 5.0))
    assert last_values(tmp_path)["token/accuracy"] == 5.0
    assert len(read_scalars(tmp_path)) == 2


def test_a_line_that_a_killed_training_cut_short_costs_only_itself(tmp_path):
    log(tmp_path, "1", {"mIoU": 1.0, "step": 1}, end='\n{"mIoU": 5')
    assert last_values(tmp_path)["mIoU"] == 1.0
    log(tmp_path, "2", {"mIoU": 2.0, "step": 2})
    assert last_values(tmp_path)["mIoU"] == 2.0


def test_missing_and_damaged_logs_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="train first"):
        read_scalars(tmp_path)
    file = tmp_path / "scalars.json"
    file.write_text('{"loss": 1.0}\n{"loss": 0.')
    with pytest.raises(ValueError, match="line 1"):
        read_scalars(file)
