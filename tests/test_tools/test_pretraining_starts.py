"""`python tools/train.py CONFIG` starts for every pre-training config, with data and sizes overridden."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from config_building import RECIPES, label, load, run_tool
from imagenet_folder import write_imagenet

from mapet_mm.structures.codebook import Codebook

METHODS = ("mapet", "pim", "mim", "beit", "cae")
SIZES = ("tiny", "small", "base")
PRETRAINING = [path for path in RECIPES if path.parent.name in METHODS]
STORED = [
    path for path in PRETRAINING if not re.search("-(online|stored)_", path.stem)
]  # tokens beside files
ONLINE = [path for path in PRETRAINING if "-online_" in path.stem]


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("imagenet")
    write_imagenet(root)
    centroids = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    Codebook(centroids).save(root / "codebook.safetensors")
    return root


def overrides(cfg, imagenet: Path) -> dict[str, object]:
    """Options for one iteration of a one-layer ViT of width 24 on the folder's photograph."""
    width = dict(embed_dims=24, num_layers=1, num_heads=3, feedforward_channels=48)
    options = {f"model.backbone.arch.{key}": value for key, value in width.items()}
    options["model.backbone.arch._delete_"] = True
    options["train_dataloader.drop_last"] = False  # two images are no batch
    options["auto_scale_lr"] = None  # in one process
    if cfg.model.type == "mapet_mm.ProjectedCAE":
        options |= {"model.neck.encoder_dims": 24, "model.neck.embed_dims": 12, "model.neck.num_heads": 3}
    else:
        options["model.head.embed_dims"] = 24
    for loader in ("train_dataloader", "val_dataloader"):
        if cfg.get(loader):
            options |= {f"{loader}.num_workers": 0, f"{loader}.dataset.data_root": imagenet}
            for i, step in enumerate(cfg[loader].dataset.pipeline):
                if "store" in step:
                    options[f"{loader}.dataset.pipeline.{i}.store"] = imagenet / "tokens"
    if "-tiny-" not in cfg.filename or "_vqkd_" in cfg.filename:  # they have the pipelines of tiny, k-CLIP
        options["custom_hooks.0.alignment"] = False
    return options | {"train_cfg.max_epochs": 1, "train_cfg.val_interval": 1}


def small_kclip(imagenet: Path) -> dict[str, object]:
    """Options for a k-CLIP that nothing is downloaded for: a small tower with random weights."""
    options = {
        "clip_model._delete_": True,
        "clip_model.layers": "[1,1,1,1]",
        "clip_model.width": 8,
        "clip_model.image_size": 448,
        "pretrained._delete_": True,
        "pretrained.type": "random",
        "pretrained.seed": 0,
        "codebook": imagenet / "codebook.safetensors",
    }
    return {f"model.target_generator.{key}": value for key, value in options.items()}


def train(monkeypatch, config: Path, work_dir: Path, options: dict[str, object]) -> str:
    """Run the tool; returns what it logged."""
    options = [f"{key}={value}" for key, value in options.items()]
    run_tool(monkeypatch, "train.py", config, "--work-dir", work_dir, "--cfg-options", *options)
    return "".join(file.read_text() for file in work_dir.glob("*/*.log"))


def check_one_step(cfg, log: str, work_dir: Path) -> None:
    term = "main" if cfg.model.type == "mapet_mm.ProjectedCAE" else "loss"
    (loss,) = re.findall(rf"Epoch\(train\) .*? {term}: ([\d.]+)", log)
    assert float(loss) == pytest.approx(np.log(8192), abs=0.6)
    assert ("token/accuracy" in log) == (cfg.val_dataloader is not None)
    checkpoint = torch.load(work_dir / "epoch_1.pth", weights_only=False)
    assert checkpoint["meta"]["iter"] == 1
    assert checkpoint["state_dict"]["backbone.pos_embed"].shape == (1, 197, 24)


def test_there_are_five_methods_three_sizes_and_two_tokenizers():
    names = {re.match(r"(\w+?)_vit-(\w+)-p16_(\w+?)_", path.stem).groups() for path in STORED}
    assert len(STORED) == len(names) == 30
    assert names == {(m, s, t) for m in METHODS for s in SIZES for t in ("kclip", "vqkd")}
    assert [path.parent.name for path in ONLINE] == ["mapet"]


# Sizes and tokenizers differ in what test_configs.py and test_hyperparameters.py check of each recipe.
QUICK = re.compile("vit-tiny-p16_kclip_|vit-base-p16_vqkd_")
MARKED = [
    pytest.param(path, marks=() if QUICK.search(path.stem) else pytest.mark.slow, id=path.stem)
    for path in STORED
]


@pytest.mark.parametrize("path", MARKED)
def test_one_iteration_on_stored_tokens_leaves_out_what_the_store_skipped(
    path, imagenet, tmp_path, monkeypatch
):
    cfg = load(path)
    broken = {
        f"{loader}.dataset.ann_file": f"meta/{cfg[loader].dataset.split}_broken.txt"
        for loader in ("train_dataloader", "val_dataloader")
        if cfg.get(loader)
    }
    log = train(monkeypatch, path, tmp_path, overrides(cfg, imagenet) | broken)
    check_one_step(cfg, log, tmp_path)
    assert log.count("skipped 1 of 2 images of ImageNet, which could not be decoded") == len(broken)


@pytest.mark.parametrize("path", ONLINE, ids=label)
def test_one_iteration_with_the_tokenizer_in_the_model(path, imagenet, tmp_path, monkeypatch):
    cfg = load(path)
    log = train(monkeypatch, path, tmp_path, overrides(cfg, imagenet) | small_kclip(imagenet))
    check_one_step(cfg, log, tmp_path)
    names = torch.load(tmp_path / "epoch_1.pth", weights_only=False)["state_dict"]
    assert not [name for name in names if name.startswith("target_generator")]
