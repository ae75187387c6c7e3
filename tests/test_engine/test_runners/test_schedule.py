"""A training that was shortened says which options shorten its schedule."""

import pytest
from config_building import ROOT
from mmengine.config import Config

from mapet_mm.engine.runners.launch import load_config
from mapet_mm.engine.runners.schedule import check_schedule

PRETRAINING = next((ROOT / "configs/mapet").glob("mapet_vit-base-p16_kclip_*.py"))
SEGMENTATION = next((ROOT / "configs/segmentation").glob("mapet_vit-tiny-p16_upernet_*.py"))


def said(cfg: Config, capsys) -> str:
    check_schedule(cfg)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "length"), [(PRETRAINING, "max_epochs=5"), (SEGMENTATION, "max_iters=400")], ids=["cls", "seg"]
)
def test_a_shortened_training_names_the_options_that_shorten_its_schedule(recipe, length, capsys):
    name, value = length.split("=")
    cfg = load_config(str(recipe), {f"train_cfg.{name}": int(value)})
    warning = said(cfg, capsys)
    assert warning.startswith("warning: ")
    assert warning.count("\n") == 1
    options = dict(word.split("=") for word in warning.split("--cfg-options ")[1].split())
    assert f"param_scheduler.1.end={value}" in warning
    cfg.merge_from_dict({key: int(one) for key, one in options.items()})
    first, last = cfg.param_scheduler
    assert 0 < first.end < last.end == int(value)
    assert not said(cfg, capsys)


def test_no_option_leaves_a_scheduler_without_a_step(capsys):
    warning = said(load_config(str(PRETRAINING), {"train_cfg.max_epochs": 1}), capsys)
    assert "param_scheduler.1.begin=0 param_scheduler.1.end=1" in warning


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
