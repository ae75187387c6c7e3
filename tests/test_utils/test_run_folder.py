"""RUN, the folder of a `mapet-mm pretrain`, by the names of its files."""

import json
from pathlib import Path

import pytest

from mapet_mm.utils.errors import UserError
from mapet_mm.utils.run_folder import Run

CONFIG = "work_dir = 'training'\ntrain_cfg = dict(max_epochs=30)\n"


@pytest.fixture
def run(tmp_path) -> Run:
    """A RUN whose training is under way."""
    folder = tmp_path / "my run"
    (folder / "training").mkdir(parents=True)
    (folder / "pretrain.py").write_text(CONFIG)
    return Run(folder)


def test_a_run_says_where_its_parts_are(run, monkeypatch):
    assert run.exists
    assert not Run(run.folder / "training").exists
    monkeypatch.chdir(run.folder.parent)
    here = Run(Path("my run"))  # paths begin as they were given
    assert str(here.store) == "my run/stored_images"  # of a method without a tokenizer
    (run / "tokenizer.py").touch()
    assert str(here.store) == "my run/tokens"
    assert str(here.checkpoint) == "my run/training/epoch_30.pth"
    assert [str(here.export(library)) for library in here.libraries] == ["my run/timm", "my run/huggingface"]


def test_what_is_not_there_yet_is_nothing(run):
    assert (run.options, run.held_out, run.verdict) == ({}, None, None)
    (run / "held_out.txt").write_text("a.jpg")
    (run / "verdict.json").write_text(json.dumps(dict(sentence="No gain seen.")))
    assert run.held_out.read_text() == "a.jpg"
    assert run.verdict["sentence"] == "No gain seen."


def test_the_newest_checkpoint_is_that_of_the_highest_epoch(run):
    with pytest.raises(UserError, match="has no epoch_N"):
        print(run.newest_checkpoint)
    for name in ("epoch_9.pth", "epoch_20.pth", "epoch_last.pth", "epoch_20.pth.part"):
        (run.work_dir / name).touch()
    assert run.newest_checkpoint.name == "epoch_20.pth"


def test_a_network_that_hugging_face_lacks_is_exported_to_timm_alone(run):
    (run / "pretrain.py").write_text(CONFIG + "exports = dict(timm=dict(architecture='vit'), hf=None)\n")
    assert run.libraries == ["timm"]
    assert run.backbone == f'backbone=dict(type="mapet_mm.TIMMViT", model_name="{run}")'
