"""`python tools/train.py CONFIG` starts for every pre-training config, with data and sizes overridden."""

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from config_building import RECIPES, ROOT, label, load
from imagenet_folder import write_imagenet

METHODS = ("mapet", "pim", "mim", "beit", "cae")
SIZES = ("tiny", "small", "base")
STORED = [path for path in RECIPES if path.parent.name in METHODS and "-online" not in path.stem]


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("imagenet")
    write_imagenet(root)
    return root


@pytest.fixture(autouse=True)
def _one_thread():
    """The tool leaves one thread behind; restore what the other tests had."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def overrides(cfg, imagenet: Path) -> list[str]:
    """--cfg-options for one iteration of a one-layer ViT of width 24 on the folder's photograph."""
    width = dict(embed_dims=24, num_layers=1, num_heads=3, feedforward_channels=48)
    options = {f"model.backbone.arch.{key}": value for key, value in width.items()}
    options["model.backbone.arch._delete_"] = True
    if cfg.model.type == "CAE":
        options |= {"model.neck.encoder_dims": 24, "model.neck.embed_dims": 12, "model.neck.num_heads": 3}
    else:
        options["model.head.embed_dims"] = 24
    for loader in ("train_dataloader", "val_dataloader"):
        if cfg.get(loader):
            store = next(i for i, step in enumerate(cfg[loader].dataset.pipeline) if "store" in step)
            options |= {
                f"{loader}.num_workers": 0,
                f"{loader}.dataset.data_root": imagenet,
                f"{loader}.dataset.pipeline.{store}.store": imagenet / "tokens",
            }
    options |= {"train_cfg.max_epochs": 1, "train_cfg.val_interval": 1, "default_hooks.logger.interval": 1}
    return [f"{key}={value}" for key, value in options.items()]


def train(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
    runpy.run_path(str(ROOT / "tools" / "train.py"), run_name="__main__")


def test_there_are_five_methods_three_sizes_and_two_tokenizers():
    names = {re.match(r"(\w+?)_vit-(\w+)-p16_(\w+?)_", path.stem).groups() for path in STORED}
    assert len(STORED) == len(names) == 30
    assert names == {(m, s, t) for m in METHODS for s in SIZES for t in ("kclip", "vqkd")}


def test_configs_are_a_few_lines_over_shared_bases():
    assert max(len(path.read_text().splitlines()) for path in STORED) <= 8


@pytest.mark.parametrize("path", STORED, ids=label)
def test_one_iteration_of_training(path, imagenet, tmp_path, monkeypatch):
    """One step with a loss near that of guessing, validation where the method has it, and a checkpoint."""
    cfg = load(path)
    train(monkeypatch, path, "--work-dir", tmp_path, "--cfg-options", *overrides(cfg, imagenet))
    log = "".join(file.read_text() for file in tmp_path.glob("*/*.log"))
    term = "main" if cfg.model.type == "CAE" else "loss"
    (loss,) = re.findall(rf"Epoch\(train\) .*? {term}: ([\d.]+)", log)
    assert float(loss) == pytest.approx(np.log(8192), abs=0.6)
    assert ("token/accuracy" in log) == (cfg.val_dataloader is not None)
    checkpoint = torch.load(tmp_path / "epoch_1.pth", weights_only=False)
    assert checkpoint["meta"]["iter"] == 1
    assert checkpoint["state_dict"]["backbone.pos_embed"].shape == (1, 197, 24)
