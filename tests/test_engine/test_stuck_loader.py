"""A loader that hangs ends its process; one whose process was stopped for a while does not."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from mmengine.hooks import Hook
from mmengine.runner.loops import _InfiniteDataloaderIterator
from torch.utils.data import DataLoader, Dataset

from mapet_mm.engine.hooks.stuck_loader_hook import StuckLoaderHook


def wait_for_a_batch(steps: int) -> None:
    """In a forked process: a batch is waited for in steps of 0.1 s, 1 s is allowed."""
    hook = StuckLoaderHook(seconds=1.0)
    hook._trains = lambda: True
    hook._since = time.monotonic()
    threading.Thread(target=hook._watch, args=((0, 1),), daemon=True).start()
    for _ in range(steps):
        time.sleep(0.1)
    os._exit(0)


@pytest.mark.parametrize(("steps", "stopped", "code"), [(3, 1.5, 0), (30, 0.0, 1)])
def test_time_in_which_the_process_was_stopped_is_no_waiting(steps, stopped, code):
    """As by a suspended job, or SIGSTOP."""
    if (child := os.fork()) == 0:
        wait_for_a_batch(steps)
    time.sleep(0.2)
    os.kill(child, signal.SIGSTOP)
    time.sleep(stopped)
    os.kill(child, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


class Slow(Dataset):
    """Images of 0.1 s each, of which one hangs."""

    def __init__(self, hangs: int | None) -> None:
        self.hangs = hangs

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        time.sleep(60 if index == self.hangs else 0.1)
        return index


def pass_over(hangs: int | None) -> None:
    """In a forked process: a resumed run of iterations passes over 16 batches; 1 s is allowed for each."""
    loader = DataLoader(Slow(hangs), num_workers=1)
    hook = StuckLoaderHook(seconds=1.0)
    hook._trains = lambda: True
    hook._loop = SimpleNamespace(dataloader_iterator=_InfiniteDataloaderIterator(loader))
    hook.before_train_epoch(None)
    threading.Thread(target=hook._watch, args=((0, 1),), daemon=True).start()
    hook._loop.dataloader_iterator.skip_iter(16)
    os._exit(0)


@pytest.mark.parametrize(("hangs", "code"), [(None, 0), (3, 1)])
def test_each_batch_that_a_resumed_run_passes_over_has_its_own_time(hangs, code):
    """Before: all of them together had the time of one."""
    if (child := os.fork()) == 0:
        pass_over(hangs)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


class Evaluating(Hook):
    """A user's hook that works for 2 s, for example on a figure every 1,000 steps."""

    def before_train_iter(self, runner, *args, **kwargs) -> None:
        time.sleep(2)


@pytest.mark.parametrize(("hook", "code"), [(Evaluating(), 0), (None, 1)])
def test_the_time_of_a_hook_is_no_waiting(hook, code):
    """It was taken for the loader's, which has done its part."""
    if (child := os.fork()) == 0:
        watch = StuckLoaderHook(seconds=1.0)
        watch._trains = lambda: True
        watch._thread, watch._since = threading.get_ident(), time.monotonic()
        threading.Thread(target=watch._watch, args=((0, 1),), daemon=True).start()
        hook.before_train_iter(None) if hook else time.sleep(2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
