"""A learning rate that is meant for another total batch is not passed over in silence."""

from types import SimpleNamespace

import pytest
from mmengine.config import Config

from mapet_mm.registry import HOOKS


def run(batch: int | None, accumulated: int, scaling: dict | None) -> None:
    cfg = Config(dict(auto_scale_lr=scaling, optim_wrapper=dict(accumulative_counts=accumulated)))
    runner = SimpleNamespace(cfg=cfg, train_dataloader=SimpleNamespace(batch_size=batch))
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


def test_another_batch_is_said_in_one_line_with_what_to_do(capture_log):
    run(64, 2, dict(base_batch_size=2048))
    (line,) = capture_log().splitlines()
    assert "meant for a total batch of 2048, this run's is 128" in line
    assert "--auto-scale-lr" in line
