"""One line says that steps wait for images, and what to do."""

from types import SimpleNamespace

import pytest
from mmengine.logging import MMLogger

from mapet_mm.engine.hooks import loader_wait_hook
from mapet_mm.registry import HOOKS


class Clock:
    """Seconds that pass when the test says so."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(loader_wait_hook, "time", clock)
    return clock


def train(clock: Clock, hook, wait: float, work: float, steps: int, first=0, by_epoch=True):
    """Steps that wait for their batch and work, in epochs of ten or with a validation after each ten."""
    loader = SimpleNamespace(num_workers=3)
    runner = SimpleNamespace(train_dataloader=loader, logger=MMLogger.get_current_instance())
    hook.before_train_epoch(runner)
    for step in range(steps):
        clock.now += wait
        if step % 10 == 0:
            clock.now += 1000.0  # the loader starts, or a validation goes by
            if by_epoch:
                hook.before_train_epoch(runner)
            elif step:
                hook.after_val(runner)
        batch_idx = step % 10 if by_epoch else first + step
        hook.before_train_iter(runner, batch_idx, data_batch={})
        clock.now += work
        hook.after_train_iter(runner, batch_idx, data_batch={}, outputs={})


def build(**options):
    return HOOKS.build(dict(type="mapet_mm.LoaderWaitHook", **options))


def test_a_run_that_waits_for_images_says_so_once_with_the_cure(clock, capture_log):
    hook = build()
    train(clock, hook, wait=3.0, work=1.0, steps=80)
    (line,) = capture_log().splitlines()
    assert "73 %" in line  # of ten steps that wait 3 s and work 1 s, one does not count
    assert "num_workers` (now 3" in line


@pytest.mark.parametrize("first", [0, 6])
def test_validations_between_iterations_and_a_resumed_start_do_not_count(first, clock, capture_log):
    """A loop of iterations has one epoch, whose first step has the number at which it resumes."""
    train(clock, build(), wait=0.0, work=1.0, steps=200, first=first, by_epoch=False)
    assert capture_log() == ""
    train(clock, build(), wait=3.0, work=1.0, steps=80, first=first, by_epoch=False)
    assert "73 %" in capture_log()


@pytest.mark.parametrize(
    ("wait", "work", "steps"),
    [
        (0.2, 1.0, 200),  # less than a fifth of the time
        (3.0, 1.0, 14),  # not for a minute
    ],
)
def test_other_runs_go_without_a_word(wait, work, steps, clock, capture_log):
    train(clock, build(), wait=wait, work=work, steps=steps)
    assert capture_log() == ""


def test_each_minute_is_looked_at_alone(clock, capture_log):
    """A disk that becomes slow on the second day is noticed after a minute."""
    hook = build()
    train(clock, hook, wait=0.0, work=1.0, steps=10_000)
    assert capture_log() == ""
    train(clock, hook, wait=1.0, work=1.0, steps=60)
    assert "of the last 6" in capture_log()
