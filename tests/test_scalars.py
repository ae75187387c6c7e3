"""What a training has logged is read back: last values, resumed and killed runs, damaged files."""

import json

import pytest

from mapet_mm.visualization.training_log import last_values, read_scalars


def log(work_dir, timestamp, *records, end="\n"):
    file = work_dir / timestamp / "vis_data/scalars.json"
    file.parent.mkdir(parents=True)
    file.write_text("\n".join(map(json.dumps, records)) + end)


def test_last_values_are_the_final_ones_of_everything_logged(tmp_path):
    log(tmp_path, "1", {"loss": 3.0, "step": 1}, {"mIoU": 9.5, "step": 1}, {"loss": 2.0, "step": 2})
    assert last_values(tmp_path) == {"loss": 2.0, "mIoU": 9.5, "step": 2.0}


def test_a_line_that_a_killed_training_cut_short_costs_only_itself(tmp_path):
    log(tmp_path, "1", {"mIoU": 1.0, "step": 1}, end='\n{"mIoU": 5')
    assert last_values(tmp_path)["mIoU"] == 1.0
    log(tmp_path, "2", {"mIoU": 2.0, "step": 2})
    assert last_values(tmp_path)["mIoU"] == 2.0


def test_missing_and_damaged_logs_say_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"scalars\.json.*tools/train\.py"):
        read_scalars(tmp_path)
    file = tmp_path / "scalars.json"
    file.write_text('{"loss": 1.0}\n{"loss": 0.')
    with pytest.raises(ValueError, match=r"scalars\.json` is damaged"):
        read_scalars(file)
    file.write_text("[1, 2]\n")
    with pytest.raises(ValueError, match=r"scalars\.json` is damaged"):
        read_scalars(file)
    with pytest.raises(FileNotFoundError, match=r"none\.json` does not exist: train with tools/train\.py"):
        read_scalars(tmp_path / "none.json")
