"""Warnings before a training: of a schedule that is longer, and of checkpoints in another unit."""

import ast
from pathlib import Path

import pytest
import torch
from config_building import ROOT
from mmengine.config import Config
from mmengine.registry import PARAM_SCHEDULERS
from torch import nn
from torch.optim import SGD

from mapet_mm.engine.runners.launch import load_config
from mapet_mm.engine.runners.schedule import check_checkpoints, check_schedule

PRETRAINING = next((ROOT / "configs/mapet").glob("mapet_vit-base-p16_kclip_*.py"))
SCRATCH = next((ROOT / "configs/scratch").glob("vit-base-p16_*.py"))
SEGMENTATION = next((ROOT / "configs/segmentation").glob("mapet_vit-tiny-p16_upernet_*.py"))


def said(cfg: Config, capsys) -> str:
    check_schedule(cfg)
    return capsys.readouterr().err


def shortened(recipe: Path, capsys, **length: int) -> Config:
    """A recipe with another length, and with the options that its warning names."""
    cfg = load_config(str(recipe), {f"train_cfg.{name}": value for name, value in length.items()})
    warning = said(cfg, capsys)
    assert warning.startswith("warning: ")
    assert warning.count("\n") == 1
    options = dict(word.split("=") for word in warning.split("--cfg-options ")[1].split())
    cfg.merge_from_dict({key: ast.literal_eval(value) for key, value in options.items()})
    return cfg


def test_the_named_options_shorten_timms_curve(capsys):
    """Warm-up, cosine and end by epoch, as in the rates of a training of five epochs."""
    cfg = shortened(PRETRAINING, capsys, max_epochs=5)
    assert not said(cfg, capsys)
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedulers = [
        PARAM_SCHEDULERS.build(one, default_args=dict(optimizer=optimizer)) for one in cfg.param_scheduler
    ]
    rates = []
    for _ in range(5):
        rates.append(round(optimizer.param_groups[0]["lr"], 2))
        for scheduler in schedulers:
            scheduler.step()
    assert rates == [0.0, 1.0, 0.72, 0.39, 0.11]


def test_the_named_options_shorten_a_schedule_of_iterations(capsys):
    cfg = shortened(SEGMENTATION, capsys, max_iters=400)
    first, last = cfg.param_scheduler
    assert 0 < first.end <= last.begin < last.end == 400
    assert not said(cfg, capsys)


def test_no_option_leaves_a_scheduler_without_a_step(capsys):
    cfg = shortened(SCRATCH, capsys, max_epochs=1)
    assert all(one.begin < one.end for one in cfg.param_scheduler)


@pytest.mark.parametrize(
    ("scheduler", "length", "warned"),
    [
        (dict(type="CosineAnnealingLR", end=300), 310, False),  # with a cool-down
        (dict(type="CosineAnnealingLR", end=300), 290, False),
        (dict(type="CosineAnnealingLR", end=300), 100, True),
        (dict(type="CosineAnnealingLR", T_max=20, begin=5), 10, True),
        (dict(type="CosineAnnealingLR", T_max=5, begin=5), 10, False),
        (dict(type="PolyLR", end=9000, by_epoch=False), 10, False),  # iterations of unknown epochs
        (dict(type="ConstantLR", factor=1.0), 10, False),
        ([dict(type="LinearLR", end=20), dict(type="CosineAnnealingLR", begin=20, end=100)], 100, False),
        (None, 10, False),
    ],
)
def test_only_a_schedule_that_ends_clearly_later_is_warned_of(scheduler, length, warned, capsys):
    cfg = Config(dict(train_cfg=dict(by_epoch=True, max_epochs=length), param_scheduler=scheduler))
    assert bool(said(cfg, capsys)) is warned


def test_no_recipe_is_warned_of(capsys):
    recipes = [path for path in (ROOT / "configs/mapet").rglob("*.py") if "linear" not in path.name]
    for path in recipes:
        cfg = load_config(str(path))
        capsys.readouterr()
        assert not said(cfg, capsys), path
    assert len(recipes) >= 10


EVERY_1000 = dict(type="CheckpointHook", interval=1000)


@pytest.mark.parametrize(
    ("train_cfg", "hooks", "warned"),
    [
        (dict(max_iters=9000), None, True),  # MMEngine's own hook
        (dict(max_iters=9000), dict(checkpoint=EVERY_1000), True),
        (dict(max_iters=9000), dict(checkpoint=dict(EVERY_1000, by_epoch=False)), False),
        (dict(max_iters=9000), dict(checkpoint=None), False),  # nobody wants any
        (dict(max_iters=9000), dict(own=dict(type="mapet_mm.InterruptionHook")), False),
        (dict(max_epochs=9), None, False),
    ],
)
def test_checkpoints_by_epoch_of_a_training_of_iterations_are_warned_of(train_cfg, hooks, warned, capsys):
    """The training is one epoch to MMEngine, which would write its first checkpoint at the end."""
    cfg = Config(dict(train_cfg=train_cfg, default_hooks=hooks))
    check_checkpoints(cfg)
    told = capsys.readouterr().err
    assert ("default_hooks.checkpoint.by_epoch=False" in told) == warned
    assert told.count("\n") == warned
