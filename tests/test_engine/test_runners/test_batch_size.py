"""The learning rate follows the images of a step: processes x batch x accumulated batches."""

import pytest
import torch
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS

from mapet_mm.engine.runners.batch_size import describe_scaling
from mapet_mm.engine.runners.build_runner import build_runner
from mapet_mm.engine.runners.launch import LaunchError, configure_training, load_config

pytestmark = pytest.mark.usefixtures("one_thread")
# The config's rate is 0.01 for a batch of 1; its layers' rates are halved with each layer below the top.
BATCH, RATE = 2, 0.01
FLEXIBLE = dict(runner_type="FlexibleRunner", env_cfg=dict())
STRATEGY = dict(FLEXIBLE, strategy=dict(type="SingleDeviceStrategy"))


def first_rates(config, tmp_path, options: dict, flag: bool) -> set[float]:
    """Rates of the parameter groups at the first step of a run."""
    options = {"param_scheduler": None, "train_cfg.max_epochs": 1, **options}
    cfg = load_config(str(config), options, str(tmp_path / "work"))
    configure_training(cfg, no_validate=True, auto_scale_lr=flag)
    runner = build_runner(cfg, "none")
    runner.train()
    wrapper = runner.optim_wrapper if hasattr(runner, "optim_wrapper") else runner.strategy.optim_wrapper
    return {round(group["lr"], 8) for group in wrapper.param_groups}


@pytest.mark.parametrize("runner", [{}, FLEXIBLE, STRATEGY], ids=["", "flexible", "strategy"])
@pytest.mark.parametrize("accumulated", [1, 4])
def test_the_rate_follows_the_images_of_a_step(config, tmp_path, runner, accumulated):
    options = {"optim_wrapper.accumulative_counts": accumulated, **runner}
    top = RATE * BATCH * accumulated
    assert first_rates(config, tmp_path, options, flag=True) == {top, top / 2, top / 4, top / 8}


def test_the_config_alone_switches_it_on(config, tmp_path):
    options = {"optim_wrapper.accumulative_counts": 3, "auto_scale_lr.enable": True}
    assert max(first_rates(config, tmp_path, options, flag=False)) == RATE * BATCH * 3


def test_without_it_the_rate_stays(config, tmp_path):
    assert max(first_rates(config, tmp_path, {"optim_wrapper.accumulative_counts": 3}, flag=False)) == RATE


def test_a_run_started_from_its_own_dumped_config_scales_once(config, tmp_path):
    options = {"optim_wrapper.accumulative_counts": 4, "auto_scale_lr.enable": True}
    for work in ("one", "two"):
        assert max(first_rates(config, tmp_path / work, options, flag=False)) == RATE * BATCH * 4
        config, options = next((tmp_path / work / "work").glob("*.py")), {}


def test_without_a_batch_size_there_is_nothing_to_scale_to(config):
    cfg = load_config(str(config))
    del cfg.train_dataloader["batch_size"]
    with pytest.raises(LaunchError, match="--auto-scale-lr: `train_dataloader` has no `batch_size` to scale"):
        configure_training(cfg, auto_scale_lr=True)


@pytest.mark.parametrize("scaled", [True, False])
def test_a_strategy_is_set_where_there_is_a_rate_to_scale_alone(config, monkeypatch, scaled):
    monkeypatch.setattr("mapet_mm.engine.runners.build_runner.RUNNERS.build", lambda cfg: cfg)
    cfg = load_config(str(config), FLEXIBLE if scaled else dict(FLEXIBLE, auto_scale_lr=None))
    expected = dict(type="SingleDeviceStrategy", auto_scale_lr=dict(base_batch_size=1))
    assert build_runner(cfg, "none").get("strategy") == (expected if scaled else None)


def test_the_words_name_what_makes_a_step(config, tmp_path):
    options = {"optim_wrapper.accumulative_counts": 8, "auto_scale_lr.base_batch_size": 64}
    cfg = load_config(str(config), options)
    assert describe_scaling(cfg, processes=8) == (
        "learning rate x 2: a step takes 128 images (8 processes x batch 2 x 8 accumulated), "
        "the config's rate is meant for 64"
    )


def wrappers(first: int, second: int) -> dict:
    optimizer = dict(type="SGD", lr=0.1)
    return dict(
        _delete_=True,
        constructor="Several",
        one=dict(optimizer=optimizer, accumulative_counts=first),
        two=dict(optimizer=optimizer, accumulative_counts=second),
    )


def test_several_optimizer_wrappers_are_scaled_alike_or_refused(config, tmp_path, monkeypatch):
    class Several:
        def __init__(self, optim_wrapper_cfg, paramwise_cfg=None):
            self.cfg = optim_wrapper_cfg

        def __call__(self, model):
            parts = {"one": model.backbone, "two": model.head}
            return OptimWrapperDict(
                **{
                    name: OptimWrapper(
                        torch.optim.SGD(part.parameters(), lr=0.1),
                        accumulative_counts=self.cfg[name]["accumulative_counts"],
                    )
                    for name, part in parts.items()
                }
            )

    monkeypatch.setitem(OPTIM_WRAPPER_CONSTRUCTORS.module_dict, "Several", Several)
    cfg = load_config(str(config), {"optim_wrapper": wrappers(4, 4)}, str(tmp_path / "work"))
    configure_training(cfg, auto_scale_lr=True)
    runner = build_runner(cfg, "none")
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    runner.scale_lr(runner.optim_wrapper, runner.auto_scale_lr)
    rates = [group["lr"] for part in runner.optim_wrapper.values() for group in part.param_groups]
    assert rates == [pytest.approx(0.1 * BATCH * 4)] * 2
    cfg = load_config(str(config), {"optim_wrapper": wrappers(4, 2)}, str(tmp_path / "other"))
    with pytest.raises(LaunchError, match=r"accumulate different numbers of batches \(2, 4\)"):
        configure_training(cfg, auto_scale_lr=True)


@pytest.mark.parametrize(
    "options", [dict(auto_scale_lr=None), dict(auto_scale_lr=dict(_delete_=True, enable=True))]
)
def test_a_rate_that_is_meant_for_no_batch_is_refused(config, options):
    with pytest.raises(LaunchError, match=r"no `auto_scale_lr = dict\(base_batch_size=...\)`"):
        configure_training(load_config(str(config), options), auto_scale_lr=True)
