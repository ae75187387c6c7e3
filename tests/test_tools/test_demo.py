"""The demo's table has the logged numbers, and its parts name what they show."""

import json
from pathlib import Path

import pytest
from config_building import ROOT
from experiments.fill import TableFiller

from mapet_mm.utils.config import read_config


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.chdir(ROOT)
    import demo

    return demo


def test_results_are_what_was_recorded_and_the_gain_in_points(demo, tmp_path):
    filler = TableFiller(demo.TABLE, [0], tmp_path)
    results = tmp_path / "digits/results"
    results.mkdir(parents=True)
    for cell in filler.plan.cells:
        value = 71.5 if cell.row == "MaPeT" else 63.0
        record = {"metrics": {cell.metric: value}, "seconds": 2.0, "made": {}, "machine": "any"}
        (results / f"{Path(cell.run.folder).name}.json").write_text(json.dumps(record))
    table = demo.results_table(filler)
    assert table.rows[0] == ["linear probe, 100 labels (top-1, %)", 63.0, 71.5, 8.5, "1.8, 2.2"]
    assert table.texts()[3][1:] == ["63.0", "71.5", "+8.5", "not measured"]
    readme = (ROOT / "README.md").read_text().split("| spread of each |")[1].partition("\n\n")[0]
    assert [line.split("|")[-2].strip() for line in readme.splitlines()[2:]] == [
        row[-1] for row in table.texts()
    ]


def test_segmentation_starts_with_the_same_images_and_trains_all_or_the_head_alone(demo, tmp_path):
    cells = [cell for cell in TableFiller(demo.TABLE, [0], tmp_path).plan.cells if cell.metric == "mIoU"]
    assert [(cell.row, cell.run.data) for cell in cells] == [
        (row, "digits_pixels") for row in ("MaPeT", "no pre-training") for _ in range(2)
    ]
    unfrozen = "model.backbone.frozen_stages=-1"
    assert [unfrozen in cell.run.command for cell in cells] == [False, True, False, True]
    assert len({cell.run.folder for cell in cells}) == 4
    cfg = read_config(demo.SEGMENTATION, "digits_pixels")
    assert (cfg.model.backbone.frozen_stages, cfg.train_dataloader.dataset.indices) == (4, 100)
