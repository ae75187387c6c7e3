"""Errors that a user can fix, which the tools show as one line.

`MAPET_MM_TRACEBACK=1` shows the traceback of these errors too; any other error is a bug and keeps its own.
"""

import errno
import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mapet_mm.dependencies import EXTRAS

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)  # or a full quota
# Exit code of a run that was told to end and continues when it is started again (`EX_TEMPFAIL`).
STOPPED = 75


class UserError(Exception):
    """An error that the user can fix; the message is one line: what is wrong, where, and what to do."""

    # KeyError, a second base of some subclasses, would print the message in quotes.
    __str__ = Exception.__str__


class LaunchError(UserError):
    """A run cannot start like this."""


def reason_of(error: Exception) -> str:
    """Type and first line of an error, for a message that says what else went wrong."""
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]


def listed(names: Sequence[str], most: int) -> str:
    """Names for a message: the first `most` of them, then dots."""
    return ", ".join(f"`{printable(name)}`" for name in names[:most]) + (", ..." if len(names) > most else "")


def printable(name: str) -> str:
    """A name with escapes for bytes that are no UTF-8, which a terminal does not take."""
    return name.encode("utf-8", "backslashreplace").decode()


def worker_message(error: Exception) -> str | None:
    """What to do about a loader's worker that was killed; None for another error."""
    reason = str(error.__cause__ or error).strip()  # PyTorch's second error does not say by which signal
    if not reason.startswith("DataLoader worker"):
        return None
    return (
        f"{reason} Most often memory is full: take fewer `num_workers` or smaller batches, or in Docker more "
        "of `--shm-size`."
    )


def one_line_errors(main: Callable[..., None]) -> Callable[..., None]:
    """Decorate a tool's `main`: an error that the user can fix ends it with one line and exit code 1."""

    @functools.wraps(main)
    def run(*args: object, **kwargs: object) -> None:
        try:
            main(*args, **kwargs)
        except KeyboardInterrupt:
            if os.environ.get("MAPET_MM_TRACEBACK"):
                raise
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it comes again from who started this process
            if is_first_to_end():
                print("\nstopped by Ctrl-C", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)  # as shells have it
        except Exception as error:
            of_worker = worker_message(error)
            can_fix = of_worker or isinstance(error, (UserError, OSError, ImportError))
            if not can_fix or os.environ.get("MAPET_MM_TRACEBACK"):
                raise
            message = of_worker or str(error)
            if getattr(error, "errno", None) in FULL_DISK:
                message += ": make room on that disk, then run the same command again, which continues"
            if message.startswith("Caught "):  # in a worker process: its traceback, then `Type: message`
                message = message.strip().rpartition("\n")[2].partition(": ")[2]
            missing = str(getattr(error, "filename", ""))
            if missing.startswith("data/") and not os.path.exists(missing):
                message = f"{missing} is missing: put the dataset there, link it, or change the config"
            if extra := EXTRAS.get(str(getattr(error, "name", "")).partition(".")[0]):
                message += f': pip install "mapet_mm[{extra}]"'
            sys.exit(f"error: {message}" if is_first_to_end() else 1)

    return run


def is_first_to_end() -> bool:
    """True unless another of torchrun's processes on this machine has ended before, and has said why.

    The others fail for the same reason, or because that one is gone.
    """
    own_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # in a folder of each process
    if own_file is None:
        return True
    try:
        open(Path(own_file).parents[1] / "first", "x").close()
    except FileExistsError:
        return False
    except OSError:  # the disk is full
        pass
    return True
