"""The learning rate follows the total batch, processes x images x accumulated batches, or is refused."""

from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from torch.utils.data import DataLoader, TensorDataset

from mapet_mm.engine.runners.build_runner import build_runner
from mapet_mm.engine.runners.launch import configure_training, load_config
from mapet_mm.registry import HOOKS
from mapet_mm.utils.errors import LaunchError

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


def run(batch: int | None, accumulated: int, scaling: dict | None, steps_done: int = 0) -> None:
    cfg = Config(dict(auto_scale_lr=scaling, optim_wrapper=dict(accumulative_counts=accumulated)))
    runner = SimpleNamespace(cfg=cfg, train_dataloader=SimpleNamespace(batch_size=batch), iter=steps_done)
    HOOKS.build(dict(type="mapet_mm.TotalBatchHook")).before_train(runner)


@pytest.mark.parametrize(
    ("batch", "accumulated", "scaling"),
    [
        (2048, 1, dict(base_batch_size=2048)),
        (64, 32, dict(base_batch_size=2048)),
        (64, 1, dict(base_batch_size=2048, enable=True)),
        (64, 1, None),
        (None, 1, dict(base_batch_size=2048)),  # a batch sampler decides
    ],
)
def test_the_batch_that_is_meant_passes_without_a_word(batch, accumulated, scaling, capture_log):
    run(batch, accumulated, scaling)
    assert capture_log() == ""


def test_another_batch_is_refused_in_one_line_with_what_to_do(capture_log):
    with pytest.raises(LaunchError, match="meant for a total batch of 2048, this run's is 128") as refused:
        run(64, 2, dict(base_batch_size=2048))
    assert "--auto-scale-lr" in str(refused.value)
    assert "auto_scale_lr=None" in str(refused.value)
    assert capture_log() == ""


def test_a_training_under_way_goes_on_with_another_batch_and_says_so(capture_log):
    run(64, 2, dict(base_batch_size=2048), steps_done=100)
    (line,) = capture_log().splitlines()
    assert "this run's is 128" in line


def test_an_epoch_without_a_step_is_refused():
    """`drop_last` leaves out the only batch of a small folder, and MMEngine would train nothing."""
    images = TensorDataset(torch.zeros(3, 1))
    runner = SimpleNamespace(cfg=Config(), train_dataloader=DataLoader(images, batch_size=4, drop_last=True))
    with pytest.raises(LaunchError, match="3 images"):
        HOOKS.build(dict(type="mapet_mm.TotalBatchHook")).before_train(runner)
