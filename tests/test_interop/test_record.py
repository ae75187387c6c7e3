"""What a training recorded beside the weights is printed, without running anything that a file holds."""

import argparse
import os

import numpy as np
import pytest
import torch
from config_building import run_tool
from timm.utils import CheckpointSaver

from mapet_mm.weight_files import write_weights

WEIGHTS = {"blocks.0.norm1.weight": torch.ones(2)}
ARGS = argparse.Namespace(
    model="vit", batch_size=512, cooldown_epochs=10, scale=[0.08, 1.0], color="\x1b[31m"
)


def show(path, monkeypatch, capsys) -> list[str]:
    """Lines that `convert.py --show FILE` prints; it asks for nothing else."""
    run_tool(monkeypatch, "convert.py", "--show", path)
    return capsys.readouterr().out.splitlines()


def test_epoch_metric_and_args_of_timms_saver_are_shown(tmp_path, monkeypatch, capsys):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    saver = CheckpointSaver(model, optimizer, args=ARGS, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(97, metric=np.float64(83.6))
    *recorded, others = show(tmp_path / "model_best.pth.tar", monkeypatch, capsys)
    assert recorded == [
        "epoch: 97",
        "metric: 83.6",
        "args.batch_size: 512",
        r"args.color: '\x1b[31m'",
        "args.cooldown_epochs: 10",
        "args.model: 'vit'",
        "args.scale: [0.08, 1.0]",
    ]
    assert {"optimizer", "state_dict"} <= set(others.removeprefix("other entries: ").split(", "))


def test_what_was_not_saved_is_said(tmp_path, monkeypatch, capsys):
    missing = ["epoch: not saved", "metric: not saved", "args: not saved"]
    torch.save({"state_dict": WEIGHTS, "new\x1b[2Jline": 1}, tmp_path / "model.tar")
    told = show(tmp_path / "model.tar", monkeypatch, capsys)
    assert told == [*missing, "other entries: new?[2Jline, state_dict"]
    write_weights(tmp_path / "model.safetensors", WEIGHTS, {"epoch": 3})
    told = show(tmp_path / "model.safetensors", monkeypatch, capsys)
    assert told == ["epoch: '3'", *missing[1:], "other entries: format"]


class Attack:
    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


def test_arguments_that_run_code_are_refused(tmp_path, monkeypatch):
    torch.save(dict(epoch=1, args=Attack(tmp_path / "canary")), tmp_path / "attack.tar")
    torch.save([1, 2], tmp_path / "list.tar")
    for name, noun in (("attack.tar", "not a checkpoint"), ("list.tar", "list"), ("none.tar", "not exist")):
        with pytest.raises(SystemExit, match=f"error: .*{name} .*{noun}"):
            run_tool(monkeypatch, "convert.py", "--show", tmp_path / name)
    assert not (tmp_path / "canary").exists()
