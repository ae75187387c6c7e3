"""Claims of folders by processes, and tools that end with the process that started them."""

import ctypes
import fcntl
import os
import signal
from typing import TextIO

PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it


def claim(folder: str) -> TextIO | None:
    """Open a file that claims a folder for this process until it ends; None if another has claimed it."""
    os.makedirs(folder, exist_ok=True)
    file = open(f"{folder}/claim", "a")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def end_with_runner() -> None:
    """Called in a tool's process before it starts: Linux then ends the tool when its starter is killed."""
    if PRCTL is not None:  # pragma: no cover, between fork and exec nothing is recorded
        PRCTL(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
