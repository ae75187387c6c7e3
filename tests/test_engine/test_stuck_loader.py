"""A loader that hangs ends its process; one whose process was stopped for a while does not."""

import os
import signal
import threading
import time

import pytest

from mapet_mm.engine.stuck_loader import StuckLoaderHook


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
