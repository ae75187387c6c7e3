"""A dataset is data: all small recipes and tables serve each of them, and a new one takes two files."""

import os
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
from config_building import ROOT, build_model, in_scope
from experiments.declaration import DeclarationError, list_tables, load_table
from mmengine.config import Config
from mmengine.registry import TRANSFORMS

from mapet_mm.engine.runners.launch import load_config
from mapet_mm.utils.config import VARIABLE, ConfigError, data_set, read_config, typed

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
NEW_TABLES = """
_base_ = "_base_/micro.py"

data = dict(folders=["data/clouds"])
runner = dict(launcher="local", cpus_per_process=1)
"""
read = cache(read_config)
MICRO = ROOT / "configs/micro"
FILES = sorted(path.name for path in MICRO.glob("*.py"))
UPERNET = "vit-micro_upernet_1xb8-poly.py"
ON_SCENES = {name for name in FILES if UPERNET in (name, (MICRO / name).read_text().split('"')[1])}
QUICK = ("digits", "digits_rotated", "fashion_mnist_20000_round1")
DATA_SETS = sorted(path.stem for path in (MICRO / "_base_/data").glob("*.py"))


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """The configs, and a dataset more."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "configs/micro/_base_/data/clouds.py").write_text(NEW)
    (folder / "configs/tables/clouds.py").write_text(NEW_TABLES)
    return folder


@pytest.fixture(autouse=True)
def _in_the_clone(clone, monkeypatch):
    monkeypatch.chdir(clone)
    monkeypatch.delenv(VARIABLE, raising=False)


def texts(node) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from texts(key)
            yield from texts(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from texts(value)


def resolved(data: str, files: list[str] = FILES) -> Iterator[Config]:
    """Every small recipe and tokenizer that the dataset has the data for."""
    for name in files:
        if data != "clouds" or name not in ON_SCENES:
            yield read(os.path.abspath(f"configs/micro/{name}"), data)


@pytest.mark.parametrize(
    "data",
    [
        *(pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in DATA_SETS),
        "clouds",
    ],
)
def test_a_recipe_holds_its_data_set_and_no_other(data):
    """No path of another one in any resolved config; the default is one like the others."""
    cfgs = {name: read_config("configs/micro/_base_/data.py", name) for name in [*DATA_SETS, "clouds"]}
    assert all(cfg.data_set == name for name, cfg in cfgs.items())
    roots = {name: {cfg.data_root, cfg.work_root} for name, cfg in cfgs.items()}
    others = set.union(*(roots[name] for name in roots if name != data))
    # Two lists of the same images are two datasets, each with a folder for its work.
    others -= {cfg.data_root for cfg in cfgs.values() if cfg.data_root == cfgs[data].data_root}
    assert not others & roots[data]
    for cfg in resolved(data):
        found = set(texts(cfg.to_dict()))
        assert not [text for text in found for root in others if f"{text}/".startswith(f"{root}/")]
        assert roots[data] <= found
        assert cfg.data_set == data
        assert data.startswith("digits") or not [text for text in found if "digits" in text]


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
    if "backbone" not in cfg.model:  # a tokenizer's own training
        sizes = [cfg.model.get("image_size"), cfg.model.get("grid"), cfg.model.get("tokenizer")]
        assert sizes[:2] in ([160, None], [None, (5, 5)], [None, None])
        assert sizes[0] or 50 in (sizes[2].get("num_embed"), sizes[2].get("vocab_size"))
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


def commands(printed: str) -> list[tuple[str, list[str]]]:
    """Dataset and words of each printed command; the last lines say how many there are."""
    lines = [shlex.split(line) for line in printed.split("\n\n")[0].splitlines()]
    return [
        (line[0].removeprefix(f"{VARIABLE}="), line[1:]) if line[0].startswith(VARIABLE) else ("", line)
        for line in lines
    ]


def run_table(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["run_table.py", *arguments])
    runpy.run_path(str(ROOT / "tools/run_table.py"), run_name="__main__")


@pytest.mark.parametrize("name", ["comparison", "cutting_point", "objectives", "tokenizers"])
def test_tables_serve_a_new_data_set(name, monkeypatch, capsys):
    """Every printed command names it and is right as it is pasted, whatever the shell had chosen before."""
    monkeypatch.setenv(VARIABLE, "digits")
    run_table(monkeypatch, name, "--dataset", "clouds", "--dry-run")
    printed = capsys.readouterr().out
    assert "digits" not in printed
    assert os.environ[VARIABLE] == "digits"
    for data, (python, tool, config, *rest) in commands(printed):
        assert (data, python) == ("clouds", "python")
        assert (ROOT / tool).is_file()
        cfg = deepcopy(read(os.path.abspath(config), data))
        if tool == "tools/train.py":
            assert rest[0] == "--work-dir"
            assert rest[1].startswith("work_dirs/tables/clouds/runs/")
            cfg.merge_from_dict(dict(word.split("=", 1) for word in rest[4:]))


def test_jobs_carry_their_data_set(monkeypatch, capsys):
    run_table(monkeypatch, "tokenizers", "--dataset", "clouds", "--dry-run", "--launcher", "slurm")
    scripts = [line for line in capsys.readouterr().out.splitlines() if line.startswith("exec ")]
    assert scripts
    assert all('"data": "clouds"' in line and "digits" not in line for line in scripts)


def test_a_table_without_scenes_leaves_their_column_out():
    heads = {name: len(load_table("objectives", name).columns) for name in ("digits", "clouds")}
    assert heads == dict(digits=7, clouds=5)
    with pytest.raises(
        DeclarationError, match=r"segmentation\.py` has no column that clouds has the data for"
    ):
        load_table("segmentation", "clouds")


def test_tables_of_a_data_set_are_its_own_and_its_familys():
    assert set(list_tables("digits")) - set(list_tables("clouds")) == {"transfer"}


def test_cutting_points_are_the_papers_shares_of_the_sequence():
    names = [row.name for row in load_table("cutting_point", "clouds").rows]
    assert [int(name.split()[2]) for name in names] == [round(c / 197 * 26) for c in (30, 40, 50, 60, 98)]


def test_transfer_evaluates_on_other_data_sets(monkeypatch, capsys):
    """The pre-training is of the digits, and each probe of its domain, which none of its paths leaves."""
    run_table(monkeypatch, "transfer", "--rows", "MaPeT", "--dry-run")
    lines = commands(capsys.readouterr().out)
    assert [data for data, _ in lines] == ["", *3 * ["digits"], "digits_inverted", "digits_rotated"]


def test_an_unknown_data_set_is_answered_with_those_that_there_are():
    with pytest.raises(
        ConfigError,
        match=r"there is no dataset `cloud` in configs/micro/_base_/data; there are: clouds, digits",
    ):
        read_config("configs/micro/kclip.py", "cloud")


@pytest.mark.parametrize("value", ["", "digits.py", "data/digits", "\\d"])
def test_a_value_that_is_no_name_is_one_line(value):
    with pytest.raises(ConfigError) as raised:
        read_config("configs/micro/kclip.py", value)
    assert VARIABLE in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_entry_is_named_with_the_config_and_the_data_set():
    with pytest.raises(ConfigError, match=rf"{UPERNET}, {VARIABLE}=clouds: .*scene_crop"):
        read_config(f"configs/micro/{UPERNET}", "clouds")


def test_a_data_set_may_bring_trained_tokenizers_of_its_own(clone):
    trained = dict(type="Pretrained", checkpoint="own.pth")
    entries = (
        f"clip_weights = 'own.pt'\nvqkd = dalle = dict(init_cfg={trained})\nclip_resnet = dict(width=16)\n"
    )
    text = NEW.replace("clouds", "trained") + entries
    (clone / "configs/micro/_base_/data/trained.py").write_text(text)
    kclip, *others = (
        read_config(f"configs/micro/{name}.py", "trained") for name in ("kclip", "vqkd", "dalle")
    )
    assert kclip.tokenizer.pretrained == "own.pt"
    assert kclip.tokenizer.clip_model == dict(layers=[1, 1, 1, 1], width=16, image_size=160)
    assert [cfg.tokenizer.tokenizer.init_cfg for cfg in others] == [trained, trained]
    assert [cfg.tokenizer.tokenizer.type for cfg in others] == ["VQKD", "DALL-E"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("patch_size = 4", "`img_size` has to be a multiple of `patch_size`"),
    ],
)
def test_a_wrong_data_set_is_refused_when_a_recipe_is_read(entry, message, clone):
    (clone / "configs/micro/_base_/data/wrong.py").write_text(f"{NEW.replace('clouds', 'wrong')}{entry}\n")
    with pytest.raises(ConfigError, match=message):
        read_config("configs/micro/kclip.py", "wrong")


def test_what_a_work_directory_keeps_depends_on_no_variable(tmp_path):
    cfg = read_config("configs/micro/mapet_vit-micro_kclip_1xb32-coslr.py", "clouds")
    cfg.dump(tmp_path / "kept.py")
    kept = read_config(tmp_path / "kept.py", "digits")
    assert kept.to_dict() == cfg.to_dict()
    assert typed(kept, "python tools/test.py") == "python tools/test.py"


def test_a_run_says_its_data_set_and_works_in_its_folder(capsys):
    with data_set("clouds"):
        cfg = load_config("configs/micro/vit-micro_1xb64-coslr.py")
    assert cfg.work_dir == "work_dirs/clouds/vit-micro_1xb64-coslr"
    assert capsys.readouterr().err == "dataset: clouds\n"
    assert typed(cfg, "python tools/test.py") == f"{VARIABLE}=clouds python tools/test.py"
    assert load_config("configs/micro/vit-micro_1xb64-coslr.py").work_dir.startswith("work_dirs/digits/")


def test_the_environment_is_as_before(monkeypatch):
    with data_set("clouds"):
        assert os.environ[VARIABLE] == "clouds"
        with data_set(None):
            assert os.environ[VARIABLE] == "clouds"
    assert VARIABLE not in os.environ
