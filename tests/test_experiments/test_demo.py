"""The demo's table has the logged numbers, and its parts name what they show."""

import json

import pytest

from mapet_mm.experiments.demo import (
    Comparison,
    final_checkpoint,
    machine_facts,
    masks_section,
    results_table,
)


def log(work_dir, *values):
    file = work_dir / "20260101_000000/vis_data/scalars.json"
    file.parent.mkdir(parents=True)
    lines = [{"accuracy/top1": value, "step": step} for step, value in enumerate(values)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(work_dir)


def test_results_are_the_last_validation_and_the_gain_in_points(tmp_path):
    """The last, not the best: the scratch run was better before."""
    scratch, pretrained = log(tmp_path / "a", 70.0, 63.0), log(tmp_path / "b", 60.0, 71.5)
    table = results_table([Comparison("probe", "accuracy/top1", scratch, pretrained)], ["one seed"])
    assert table.rows == [["probe", 63.0, 71.5, 8.5]]
    assert table.texts() == [["probe", "63.0", "71.5", "+8.5"]]


def test_unfinished_training_is_no_result(tmp_path):
    scratch = log(tmp_path / "a", 63.0)
    with pytest.raises(FileNotFoundError, match=r"`.*/b` does not exist: train with tools/train\.py"):
        results_table([Comparison("probe", "accuracy/top1", scratch, str(tmp_path / "b"))])


@pytest.mark.parametrize(
    ("loop", "name"),
    [("dict(by_epoch=True, max_epochs=16)", "epoch_16.pth"), ("dict(max_iters=160)", "iter_160.pth")],
)
def test_final_checkpoint_is_named_by_the_training_loop(tmp_path, loop, name):
    (tmp_path / "config.py").write_text(f"train_cfg = {loop}\n")
    assert final_checkpoint(tmp_path / "config.py", "work") == f"work/{name}"


def test_facts_name_the_versions_that_ran():
    import mmengine
    import torch

    facts = dict(machine_facts(jobs=2))
    assert facts["torch"] == torch.__version__
    assert facts["mmengine"] == mmengine.__version__
    assert facts["side by side"] == "2 stages with one thread each"


def test_masks_section_draws_all_three_objectives():
    section = masks_section()
    titles = [axes.get_title() for figure in section.figures for axes in figure.axes]
    assert titles == ["MaPeT", "PIM", "MIM"]
