"""One line says how far a training is: live in a terminal, once a minute in a file."""

import re
import sys
from types import SimpleNamespace

import pytest
from mmengine.logging import MessageHub, MMLogger

from mapet_mm.engine.hooks import progress_hook


class Loader(SimpleNamespace):
    """As much of a data loader as the line takes."""

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("is_live", [True, False])
def test_the_line_has_epoch_step_loss_rate_and_time_left(is_live, monkeypatch, capsys):
    clock = iter(range(0, 10_000, 30))
    monkeypatch.setattr(progress_hook.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(progress_hook.sys.stderr, "isatty", lambda: is_live, raising=False)
    logger, hub = (kind.get_instance(f"progress {is_live}") for kind in (MMLogger, MessageHub))
    logger.handlers[0].setStream(sys.stderr)  # one terminal for both
    loader = Loader(batch_size=8, dataset=range(20))  # 8, 8 and 4 images in an epoch
    runner = SimpleNamespace(iter=0, epoch=1, max_iters=6, max_epochs=2, train_dataloader=loader)
    runner.logger, runner.message_hub = logger, hub
    hook = progress_hook.ProgressHook()
    hook.before_train(runner)
    for runner.iter in range(6):
        hub.update_scalar("train/loss", 3.0 - runner.iter)
        hook.after_train_iter(runner, runner.iter, dict(data_samples=range((8, 8, 4)[runner.iter % 3])))
    logger.info("Epoch(train) [1][10/20] loss: 1")
    logger.info("Saving checkpoint at 2 epochs")
    hook.after_train(runner)
    printed = capsys.readouterr()
    assert re.search(r"(^|[\r\n])\d\d/\d\d [\d:]+ - [^\r\n]*Saving", printed.err)  # on a line of its own
    lines = [line for line in re.split("[\r\n]", printed.err if is_live else printed.out) if "step" in line]
    assert re.search(r"epoch 2/2, step 6/6, loss -2\.000: 100%.* 40.0/40.0 \[.*images/s\]", lines[-1])
    assert is_live or len(lines) == 3  # a line a minute; the clock runs 30 seconds at each look
    assert "Epoch(train)" not in printed.err
