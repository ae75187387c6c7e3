"""Signals that tell a run to end: who sends them, and how a process listens."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

# A terminal's SIGHUP when it closes and SIGINT at Ctrl-C; Slurm's SIGUSR1 before a time limit (`--signal`),
# and its SIGTERM when it takes the machine away.
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Whoever starts processes passes signals on, and Slurm sends them to all, so a process gets one several
# times. What comes later than this is a further one.
SAME_SIGNAL_SECONDS = 10


def listen(handler: Callable[[int, FrameType | None], None]) -> Callable[[], None]:
    """Let a handler take `SIGNALS`, in the main thread alone, where Python takes them.

    A SIGHUP that is ignored stays so: that is how nohup keeps a run when its terminal closes.

    Returns:
        Gives the signals back to those who had them.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    heard = [number for number in SIGNALS if number != signal.SIGHUP or not _is_ignored(number)]
    before = {number: signal.signal(number, handler) for number in heard}

    def give_back() -> None:
        for number, earlier in before.items():
            signal.signal(number, earlier)

    return give_back


def _is_ignored(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN
