"""The demo runs to its report with short stages, and its table compares what it says."""

import contextlib
import json
import os
import re
import runpy
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import demo
import demo_stages
import pytest
from config_building import ROOT
from dataset_converters.digits import write_pixel_labels
from digits_tokenizer import few_digits, write_few_digits
from mmseg.visualization import SegLocalVisualizer

from mapet_mm.utils.config import read_config
from mapet_mm.visualization.report import Report

IMAGES = 30  # in each split


class CommandHere:
    """A `Popen` that runs a tool in this process, which spares each of them its imports."""

    returncode = 0

    def __init__(self, words, env, stdout, stderr):
        _, _, _, *command = words
        streams = contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr)
        with patch.dict(os.environ, env), patch.object(sys, "argv", command), streams[0], streams[1]:
            if command == ["tools/dataset_converters/digits.py"]:
                write_few_digits(Path("data/digits"), IMAGES)
                with few_digits(IMAGES):
                    write_pixel_labels(Path("data/digits_pixels"))
            else:
                SegLocalVisualizer._instance_dict.clear()  # or this run logs into the last one's work dir
                runpy.run_path(command[0], run_name="__main__")

    def poll(self):
        return 0


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A working folder with nothing but the tools, the configs and the reference log."""
    for name in ("configs", "docs", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)  # which the demo takes as Ctrl-C


def run_quickly(monkeypatch, *words: str) -> tuple[str, list[demo_stages.Stage]]:
    """The report's page and the stages of a demo that trains one epoch, and is not run again."""
    monkeypatch.setattr(demo_stages, "subprocess", SimpleNamespace(Popen=CommandHere))
    demo.main(["--quick", *words])
    page = Path("work_dirs/demo/report.html").read_text()
    stages = demo.plan_stages(Path("work_dirs/demo"), quick=True, comparison="--comparison" in words)
    assert all(stage.is_done for stage in stages)
    for stage in stages:
        assert stage.line.replace("'", "&#x27;") in page
    monkeypatch.setattr(demo_stages, "subprocess", None)  # a stage that started would fail
    monkeypatch.setattr(demo, "make_report", lambda *_: Report("", "", demo.Table([], []), [], [], []))
    demo.main(["--quick", *words])
    return page, stages


def test_frozen_features_are_shown_beside_those_of_random_weights(clone, monkeypatch, capsys):
    page, stages = run_quickly(monkeypatch)
    assert page.count("<img") == 2 + 1 + 3  # curves, codebook, masks
    printed = capsys.readouterr().out
    assert "report: work_dirs/demo/report.html" in printed
    assert "5 of 5 stages were done before" in printed
    mapet, random = json.loads(stages[-1].output.read_text()).values()
    rows = demo.frozen_table(stages[-1]).rows
    assert [row[1:] for row in rows] == [
        [other["value"], own["value"], own["value"] - other["value"]]
        for own, other in zip(mapet, random, strict=True)
    ]
    assert {row[0].partition(",")[0] for row in rows} == {"k-NN", "logistic regression"}


@pytest.mark.slow
def test_the_comparison_has_the_last_value_of_each_trainings_log(clone, monkeypatch, capsys):
    page, stages = run_quickly(monkeypatch, "--comparison")
    assert page.count("<img") == 2 + 1 + 3 + 2  # curves, codebook, masks, segmentations
    (row,) = (row for row in demo.results_table(stages).rows if row[0].startswith("fine-tuning, all"))
    logged = [
        float(re.findall(r"accuracy/top1: ([\d.]+)", stage.log.read_text())[-1])
        for stage in stages
        if stage.name in ("all-labels-scratch", "all-labels-mapet")
    ]
    assert row[1:4] == pytest.approx([*logged, logged[1] - logged[0]], abs=1e-3)


def test_without_pretraining_as_many_images_are_seen_and_no_layer_learns_slower(clone):
    """Each fine-tuning from random weights, against the pre-training and the fine-tuning after it."""

    def images_seen(config, data, per_epoch):
        cfg = read_config(config, data)
        if "max_iters" in cfg.train_cfg:
            return cfg.train_cfg.max_iters * cfg.train_dataloader.batch_size
        return cfg.train_cfg.max_epochs * per_epoch

    tasks = {task.name: task for task in demo.TASKS}
    pretraining = images_seen(demo.PRETRAINING, "digits", 1437)
    for name, labels in (("few-labels", 100), ("all-labels", 1437), ("segmentation", 100)):
        task = tasks[name]
        scratch = read_config(task.scratch_recipe, task.data)
        both = pretraining + images_seen(task.recipe, task.data, labels)
        assert images_seen(task.scratch_recipe, task.data, labels) == pytest.approx(both, rel=1e-3)
        assert "layer_decay_rate" not in str(scratch.optim_wrapper)
        assert scratch.model.backbone.init_cfg is None
        # The schedule is as long as the training.
        length = scratch.train_cfg.get("max_epochs") or scratch.train_cfg.max_iters
        assert scratch.param_scheduler[-1].end == length


def test_frozen_and_fine_tuned_segmentation_train_the_head_alone_or_all(clone):
    stages = {stage.name: stage for stage in demo.plan_stages(Path("out"), comparison=True)}
    unfrozen = "model.backbone.frozen_stages=-1"
    for start in ("scratch", "mapet"):
        assert unfrozen not in stages[f"segmentation-frozen-{start}"].command
        assert unfrozen in stages[f"segmentation-{start}"].command
    cfg = read_config(demo.SEGMENTATION, "digits_pixels")
    assert (cfg.model.backbone.frozen_stages, cfg.train_dataloader.dataset.indices) == (4, 100)


def test_a_changed_recipe_runs_anew_with_all_that_starts_from_it(clone):
    before = {stage.name: stage.folder for stage in demo.plan_stages(Path("out"), comparison=True)}
    (clone / "configs").unlink()
    (clone / "configs").mkdir()
    for path in (ROOT / "configs").iterdir():
        (clone / "configs" / path.name).symlink_to(path)
    (clone / "configs/micro").unlink()
    (clone / "configs/micro").mkdir()
    for path in (ROOT / "configs/micro").iterdir():
        (clone / "configs/micro" / path.name).symlink_to(path)
    recipe = clone / demo.PRETRAINING
    text = recipe.read_text()
    recipe.unlink()
    recipe.write_text(f"{text}optim_wrapper = dict(optimizer=dict(lr=1e-3))\n")
    after = {stage.name: stage.folder for stage in demo.plan_stages(Path("out"), comparison=True)}
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"pretraining", *(f"{task.name}-mapet" for task in demo.TASKS)}


def test_the_page_shows_the_same_rows_and_spreads():
    page = (ROOT / "research/results/demo_comparison.md").read_text()
    lines = page.split("| spread of each |")[1].partition("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [(row[0], row[-1]) for row in cells] == [(task.heading, task.spread) for task in demo.TASKS]
