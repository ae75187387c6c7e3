"""How much of a training's change of its start is kept."""

from pathlib import Path

import pytest
import torch

from mapet_mm.cli import change
from mapet_mm.cli.change import changed, choose_change, set_aside
from mapet_mm.cli.options import PretrainOptions
from mapet_mm.cli.pretrain import stages
from mapet_mm.utils.run_folder import Run
from mapet_mm.weight_files import read_checkpoint, write_weights

NAMES = [f"p{group}/{index}.png" for group in range(6) for index in range(5)]


@pytest.fixture
def options(tmp_path) -> PretrainOptions:
    """Of a RUN with 30 tested images of 2 classes in 6 groups."""
    tested = [f"{name} {index % 2}" for index, name in enumerate(NAMES)]
    (tmp_path / "held_out.txt").write_text("\n".join(NAMES))
    (tmp_path / "verdict_val.txt").write_text("\n".join(tested))
    (tmp_path / "verdict_train.txt").write_text("v.png 0")
    return PretrainOptions(images="mine", out=tmp_path, init="timm:vit", change="knn")


def lists(run: Path) -> tuple[list[str], list[str]]:
    return tuple((run / f"verdict_{part}.txt").read_text().splitlines() for part in ("choose", "val"))


@pytest.mark.parametrize("with_groups", [False, True])
def test_a_third_of_the_tested_images_chooses_and_the_verdict_takes_the_others(
    options, tmp_path, with_groups
):
    before = (tmp_path / "verdict_val.txt").read_text().splitlines()
    groups = {name: name[:2] for name in NAMES if with_groups}
    assert "10 of the tested images choose" in set_aside(options, groups)
    choosing, tested = lists(tmp_path)
    assert (len(choosing), sorted(choosing + tested)) == (10, sorted(before))
    assert sum(line.endswith(" 1") for line in choosing) == 5
    divided = {line[:2] for line in choosing} & {line[:2] for line in tested}
    assert bool(divided) is not with_groups


def test_the_exports_are_of_the_result(options, tmp_path):
    (tmp_path / "pretrain.py").write_text(
        "work_dir = 'training'\ntrain_cfg = dict(max_epochs=2)\n"
        "train_dataloader = dict(dataset=dict(type='A'))"
    )
    whole = {stage.title: stage.shown for stage in stages(options)}
    assert "change" not in whole
    assert "training/epoch_2.pth " in whole["for timm"]
    set_aside(options, {})
    titles = [stage.title for stage in stages(options)]
    assert titles[-5:] == ["pre-training", "change", "for timm", "for Hugging Face", "verdict"]
    part = {stage.title: stage.shown for stage in stages(options)}
    assert "training/epoch_2_kept.pth " in part["for timm"]


def test_without_labels_or_images_all_of_the_change_is_kept(options, tmp_path):
    (tmp_path / "verdict_val.txt").write_text("a.png 0")
    assert "1 tested images are too few" in set_aside(options, {})
    (tmp_path / "verdict_train.txt").write_text("")
    assert "no labels" in set_aside(options, {})
    (tmp_path / "held_out.txt").unlink()
    assert "no labels" in set_aside(options, {})
    assert not (tmp_path / "verdict_choose.txt").exists()


def test_what_is_new_is_as_trained_and_the_rest_a_share_of_the_way():
    start = {"a": torch.tensor([1.0, 3.0])}
    trained = {"a": torch.tensor([2.0, 7.0]), "head": torch.tensor([5.0])}
    for share, expected in ((0, [1.0, 3.0]), (0.25, [1.25, 4.0]), (1, [2.0, 7.0])):
        mixed = changed(start, trained, share)
        assert (mixed["a"].tolist(), mixed["head"].tolist()) == (expected, [5.0])


@pytest.mark.parametrize(("best", "kept"), [((0.5,), 0.5), ((0,), 0), ((0.25, 0.75), 0.75)])
def test_the_share_with_the_best_neighbours_is_the_result(options, tmp_path, monkeypatch, best, kept):
    """Of two equal ones the larger."""
    set_aside(options, {})
    run = Run(tmp_path)
    (run / "pretrain.py").write_text("work_dir = 'training'\ntrain_cfg = dict(max_epochs=2)\n")
    write_weights(run / "init.pth", {"backbone.a": torch.zeros(1)})
    write_weights(run / "training/epoch_2.pth", {"backbone.a": torch.ones(1)}, dict(epoch=2))
    monkeypatch.setattr(change, "drop_skipped", lambda *_: None)

    def top1(checkpoint: Path, cache: Path) -> float:
        weights, _ = read_checkpoint(checkpoint)
        return 90.0 if weights["backbone.a"].item() in best else 50.0

    monkeypatch.setattr(change, "top1_of", top1)
    assert run.newest_checkpoint == run.checkpoint
    assert choose_change(run, tmp_path / "features") == kept
    assert run.newest_checkpoint == run.result == tmp_path / "training/epoch_2_kept.pth"
    weights, meta = read_checkpoint(run.result)
    assert (weights["backbone.a"].item(), meta) == (kept, dict(epoch=2, change=kept))
    assert not (tmp_path / "training/trial.pth").exists()
