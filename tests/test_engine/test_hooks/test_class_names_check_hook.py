"""An index that means one class in training and another in validation or a test stops the run."""

import numpy as np
import pytest
from config_building import run_tool
from PIL import Image
from torch import nn
from trainings import CONFIG

from mapet_mm.engine.hooks.class_names_check_hook import (
    ClassNamesError,
    check_class_order,
    classifying_modules,
)
from mapet_mm.models import MaPeTPretrainViT, TokenPredictionHead


@pytest.fixture
def config(tmp_path):
    """Three classes to learn; the folder `val` lacks the first one, `whole` does not."""
    for split, classes in (("train", "abc"), ("val", "bc"), ("whole", "abc")):
        for grey, name in enumerate("abc"):
            if name in classes:
                (tmp_path / split / name).mkdir(parents=True)
                image = Image.fromarray(np.full((16, 16, 3), 100 * grey, np.uint8))
                for number in range(2):
                    image.save(tmp_path / split / name / f"{number}.png")
    text = CONFIG.replace("DATA", str(tmp_path)).replace("num_classes=2", "num_classes=3")
    text += """
train_dataloader["dataset"]["data_prefix"] = "train"
val_dataloader = dict(val_dataloader, dataset=dict(train_dataloader["dataset"], data_prefix="val"))
test_dataloader = val_dataloader
"""
    (tmp_path / "config.py").write_text(text)
    return tmp_path / "config.py"


NOT_LEARNT_AS = r"class `b` is number 0 in the {} images and number 1 in the {} images: add the class folder"


def test_a_class_folder_that_validation_lacks_stops_a_training(config, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=NOT_LEARNT_AS.format("validation", "training")):
        run_tool(monkeypatch, "train.py", config, "--work-dir", tmp_path / "work")


def test_a_class_folder_that_a_test_set_lacks_stops_the_test(config, tmp_path, monkeypatch, capsys):
    whole = ["--cfg-options", "val_dataloader.dataset.data_prefix=whole"]
    run_tool(monkeypatch, "train.py", config, "--work-dir", tmp_path / "work", *whole)
    arguments = ["test.py", config, tmp_path / "work/epoch_2.pth", "--work-dir", tmp_path / "test"]
    with pytest.raises(SystemExit, match=NOT_LEARNT_AS.format("test", "checkpoint's")):
        run_tool(monkeypatch, *arguments)
    for option in ("test_dataloader.dataset.data_prefix=whole", "default_hooks.class_names_check=None"):
        run_tool(monkeypatch, *arguments, "--cfg-options", option)
        assert "accuracy/top1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "measured", ["", "abc", "ab", "abcd", "xyz", "abx", ["crane", "a", "crane"], ["a", "b", "c, a kind of c"]]
)
def test_names_that_only_one_set_has_are_not_in_another_order(measured):
    learnt = measured if "crane" in measured else ["a", "b", "c"]
    check_class_order(learnt, list(measured), "training", "validation")
    check_class_order([], list(measured), "training", "validation")


@pytest.mark.parametrize("measured", ["bc", "acb", "ac", "xa"])
def test_one_order_behind_another_is(measured):
    with pytest.raises(ClassNamesError):
        check_class_order("abc", list(measured), "training", "validation")


def test_a_pre_training_predicts_no_classes():
    """Its validation set may be of other classes."""
    arch = dict(embed_dims=24, num_layers=1, num_heads=3, feedforward_channels=48)
    parts = dict(backbone=MaPeTPretrainViT(arch, 20, 4, 8), head=TokenPredictionHead(24, 11))
    assert not classifying_modules(nn.ModuleDict(parts))
    classifier = nn.Linear(24, 3)
    classifier.num_classes = 3
    assert classifying_modules(nn.ModuleDict(dict(parts, head=classifier)))
    assert not classifying_modules(nn.ModuleDict(dict(backbone=classifier)))
