"""The learning rate follows the images of a step: processes x batch x accumulated batches."""

import pytest

from mapet_mm.engine.runners.build_runner import build_runner
from mapet_mm.engine.runners.launch import configure_training, load_config
from mapet_mm.engine.runners.resume import LaunchError

# The config's rate is 0.01 for a batch of 1; its layers' rates are halved with each layer below the top.
BATCH, RATE = 2, 0.01


def first_rates(config, tmp_path, options: dict, flag: bool) -> set[float]:
    options = {"param_scheduler": None, "train_cfg.max_epochs": 1, **options}
    cfg = load_config(str(config), options, str(tmp_path / "work"))
    configure_training(cfg, no_validate=True, auto_scale_lr=flag)
    runner = build_runner(cfg, "none")
    runner.train()
    return {round(group["lr"], 8) for group in runner.optim_wrapper.param_groups}


def test_the_rate_follows_the_images_of_a_step_if_asked(config, tmp_path):
    options = {"optim_wrapper.accumulative_counts": 4}
    top = RATE * BATCH * 4
    assert first_rates(config, tmp_path, options, flag=True) == {top, top / 2, top / 4, top / 8}
    assert max(first_rates(config, tmp_path / "unscaled", options, flag=False)) == RATE


def test_a_run_started_from_its_own_dumped_config_scales_once(config, tmp_path):
    options = {"optim_wrapper.accumulative_counts": 4, "auto_scale_lr.enable": True}
    for work in ("one", "two"):
        assert max(first_rates(config, tmp_path / work, options, flag=False)) == RATE * BATCH * 4
        config, options = next((tmp_path / work / "work").glob("*.py")), {}


def test_accumulated_batches_in_a_loop_of_iterations_are_said_with_the_numbers_to_set(config, capsys):
    loop = dict(_delete_=True, type="IterBasedTrainLoop", max_iters=160_000, val_interval=16_000)
    cfg = load_config(str(config), {"train_cfg": loop, "optim_wrapper.accumulative_counts": 8})
    configure_training(cfg)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "accumulative_counts" in line]
    assert "20000 updates" in line
    assert "max_iters=1280000" in line
    with pytest.raises(LaunchError, match="20000 updates"):
        configure_training(cfg, auto_scale_lr=True)


@pytest.mark.parametrize("scaling", [None, dict(_delete_=True, enable=True)])
def test_a_rate_that_is_meant_for_no_batch_is_refused(config, scaling):
    with pytest.raises(LaunchError, match="base_batch_size"):
        configure_training(load_config(str(config), dict(auto_scale_lr=scaling)), auto_scale_lr=True)
