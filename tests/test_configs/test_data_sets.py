"""A dataset is data: all small recipes serve each of them, and a new one takes one file."""

import os
import shutil
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
from config_building import ROOT, build_model, in_scope
from mmengine.config import Config
from mmengine.registry import TRANSFORMS

from mapet_mm.engine.runners.launch import load_config
from mapet_mm.utils.config import VARIABLE, data_set, read_config, shell_command

NEW = """
_base_ = "../data_defaults.py"

data_set = "clouds"
work_root = "work_dirs/clouds"
data_root = "data/clouds"

img_size = 30
patch_size = 6
num_classes = 7
vocab_size = 50
pretrain_epochs = 3
train_images = dict(type="CustomDataset", data_root=data_root, data_prefix="train")
few_images = dict(type="CustomDataset", data_root=data_root, ann_file="few.txt")
few_labels = "1 % of the labels"
val_images = dict(type="CustomDataset", data_root=data_root, data_prefix="val")
"""
read = cache(read_config)
MICRO = ROOT / "configs/micro"
FILES = sorted(path.name for path in MICRO.glob("*.py"))
UPERNET = "vit-micro_upernet_1xb8-poly.py"
ON_SCENES = {
    name
    for name in FILES
    if "segmentation" in name or UPERNET in (name, (MICRO / name).read_text().split('"')[1])
}
QUICK = ("digits", "digits_rotated", "clouds")
DATA_SETS = sorted(path.stem for path in (MICRO / "_base_/data").glob("*.py"))


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "configs/micro/_base_/data/clouds.py").write_text(NEW)
    return folder


@pytest.fixture(autouse=True)
def _in_the_clone(clone, monkeypatch):
    monkeypatch.chdir(clone)
    monkeypatch.delenv(VARIABLE, raising=False)


def resolved(data: str, files: list[str] = FILES) -> Iterator[Config]:
    """Every small recipe and tokenizer that the dataset has the data for."""
    for name in files:
        if data != "clouds" or name not in ON_SCENES:
            yield read(os.path.abspath(f"configs/micro/{name}"), data)


@pytest.mark.parametrize(
    "data",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in [*DATA_SETS, "clouds"]],
)
def test_a_recipe_holds_its_data_set_and_no_other(data):
    cfgs = {name: read_config("configs/micro/_base_/data.py", name) for name in [*DATA_SETS, "clouds"]}
    roots = {name: {cfg.data_root, cfg.work_root} for name, cfg in cfgs.items()}
    # Two lists of the same images are two datasets, each with a folder for its work.
    others = set.union(*(found for name, found in roots.items() if name != data)) - {cfgs[data].data_root}
    assert not others & roots[data]
    for cfg in resolved(data):
        text = str(cfg.to_dict())
        assert not [root for root in others if f"'{root}/" in text or f"'{root}'" in text]
        assert all(f"'{root}" in text for root in roots[data])
        assert cfg.data_set == data
        assert data.startswith("digits") or "digits" not in text


@pytest.mark.parametrize("name", [name for name in FILES if name not in ON_SCENES])
def test_a_recipe_has_the_sizes_of_a_new_data_set(name):
    """30 px in patches of 6: a grid of 5; 7 classes, 50 tokens, lengths of its own; everything builds."""
    (cfg,) = map(deepcopy, resolved("clouds", [name]))
    with in_scope(cfg):
        loaders = [cfg[key].dataset for key in cfg if key.endswith("_dataloader") and cfg[key]]
        for dataset in loaders or cfg.dataset:
            for step in dataset.pipeline:
                if "store" not in step:
                    TRANSFORMS.build(step)
    if "model" not in cfg:
        assert cfg.tokenizer.get("image_size", cfg.tokenizer.get("clip_model", {}).get("image_size")) % 5 == 0
        assert cfg.tokenizer.get("vocab_size") == 50 or cfg.codebook.k == 50
        return
    model = build_model(cfg)
    if cfg.model.backbone.type != "mapet_mm.TokenMLP":
        assert tuple(model.backbone.patch_resolution) == (5, 5)
    if "num_classes" in (cfg.model.head or {}):
        assert cfg.model.head.num_classes == cfg.data_preprocessor.num_classes == 7
    if "target_generator" in cfg.model:
        assert cfg.train_cfg.max_epochs == 3
        assert cfg.model.target_generator.vocab_size == 50
    if cfg.model.backbone.get("objective") == "mapet":
        registers = model.backbone.num_extra_tokens - 1
        assert (model.backbone.num_tokens, model.backbone.cutting_point) == (26 + registers, 8 + registers)


@pytest.mark.parametrize(
    ("recipe", "data", "error", "noun"),
    [
        ("kclip.py", "cloud", FileNotFoundError, r"data/cloud\.py"),
        ("kclip.py", "wrong", AssertionError, "multiple of `patch_size`"),
        (UPERNET, "clouds", AttributeError, "scene_crop"),
    ],
)
def test_data_sets_that_do_not_exist_or_do_not_fit_are_refused(recipe, data, error, noun, clone):
    wrong = clone / "configs/micro/_base_/data/wrong.py"
    wrong.write_text(NEW.replace("clouds", "wrong") + "patch_size = 4\n")
    with pytest.raises(error, match=noun):
        read_config(f"configs/micro/{recipe}", data)
    wrong.unlink()


def test_what_a_work_directory_keeps_depends_on_no_variable(tmp_path):
    cfg = read_config("configs/micro/mapet_vit-micro_kclip_1xb32-coslr.py", "clouds")
    cfg.dump(tmp_path / "kept.py")
    kept = read_config(tmp_path / "kept.py", "digits")
    assert kept.to_dict() == cfg.to_dict()
    assert shell_command(kept, ["test"]) == "mapet-mm test"


def test_a_run_says_its_data_set_and_works_in_its_folder(capsys):
    with data_set("clouds"):
        cfg = load_config("configs/micro/vit-micro_1xb64-coslr.py")
    assert cfg.work_dir == "work_dirs/clouds/vit-micro_1xb64-coslr"
    assert capsys.readouterr().err == "dataset: clouds\n"
    assert shell_command(cfg, ["test", "my run"]) == f"{VARIABLE}=clouds mapet-mm test 'my run'"
    assert load_config("configs/micro/vit-micro_1xb64-coslr.py").work_dir.startswith("work_dirs/digits/")
