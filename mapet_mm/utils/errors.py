"""Errors that a user can fix, and the function that decides how the tools show an error.

A tool's `main` shows an error that a user can fix as one line, `error: ...`, with exit code 1: a `UserError`,
an error of the file system, a missing package, and any other error raised by a check in this package.
Anything else is a bug and keeps its traceback; `MAPET_MM_TRACEBACK=1` shows the traceback of all errors.
"""

import functools
import os
import re
import select
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec

from mapet_mm.dependencies import EXTRAS

TRACEBACK = "MAPET_MM_TRACEBACK"
# Errors that checks raise; an AssertionError or a NotImplementedError is always a bug.
CHECKS = (ValueError, KeyError, RuntimeError, TypeError)
PACKAGE = Path(__file__).parents[1]
# Exit code of a run that was told to end and continues when it is started again (`EX_TEMPFAIL`).
STOPPED = 75
# Other processes of torchrun wait before they print: if the first one has failed too, torchrun ends them.
PATIENCE_SECONDS = 10

Arguments = ParamSpec("Arguments")

_FRAME = re.compile(r'^ *File "(.+?)", line \d+, in .+\n +(.+)$', re.MULTILINE)


class UserError(Exception):
    """An error that the user can fix; the message is one line: what is wrong, where, and what to do."""

    # KeyError, a second base of some subclasses, would print the message in quotes.
    __str__ = Exception.__str__


def reason_of(error: Exception) -> str:
    """Type and first line of an error, for a message that says what else went wrong."""
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]


def listed(names: Sequence[str], most: int) -> str:
    """Names for a message; of more than `most` the first ones."""
    return ", ".join(f"`{name}`" for name in names[:most]) + (", ..." if len(names) > most else "")


def one_line_errors(main: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Decorate a tool's `main`: errors that the user can fix end it with one line and exit code 1."""

    @functools.wraps(main)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            main(*args, **kwargs)
            sys.stdout.flush()
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _reader_has_gone():
                sys.exit(1)
            process = _process()
            if os.environ.get(TRACEBACK) or not for_the_user(error):
                if process:
                    print(f"{process} ends with an error:", file=sys.stderr)
                raise
            message = f"error: {process}{': ' if process else ''}{what_it_says(error)}"
            if os.environ.get("LOCAL_RANK", "0") != "0" and "TORCHELASTIC_RUN_ID" in os.environ:
                time.sleep(PATIENCE_SECONDS)
            sys.exit(message)

    return run


def _reader_has_gone() -> bool:
    """Whether nobody reads the standard output any more, as behind `| head`; then it goes nowhere."""
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)
    gone = any(event & select.POLLERR for _, event in reader.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


def _process() -> str:
    """Names this process among several, unless it is the first."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    count = os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", ""))
    return "" if rank == "0" else f"process {rank} of {count}"


def for_the_user(error: Exception) -> bool:
    """Whether the user can fix the error, rather than the authors of the code."""
    if isinstance(error, (UserError, OSError, ImportError)):
        return True
    frames = _FRAME.findall(_text(error))
    return isinstance(error, CHECKS) and bool(frames) and _is_check(*frames[-1])


def what_it_says(error: Exception) -> str:
    """The error's message; for an error in a worker process, the worker's message without its traceback."""
    if isinstance(error, ModuleNotFoundError) and (extra := EXTRAS.get(str(error.name).partition(".")[0])):
        return f'{error}: pip install "mapet_mm[{extra}]"'
    if (worker := _worker_text(error)) is None:
        return str(error.args[0]) if type(error) is KeyError and error.args else str(error)
    messages = re.split(rf"^(?:[\w.]+\.)?{type(error).__name__}: ", worker, flags=re.MULTILINE)
    return messages[-1].strip()


def _is_check(file: str, line: str) -> bool:
    return Path(file).is_relative_to(PACKAGE) and line.startswith("raise ")


def _text(error: Exception) -> str:
    return _worker_text(error) or "".join(traceback.format_exception(error))


def _worker_text(error: Exception) -> str | None:
    """Message of a worker's error, from the worker's traceback in the text of a data loader's error."""
    text = str(error.args[0]) if error.args else ""
    return text if re.match(r"Caught \w+ in .+\.\nOriginal Traceback", text) else None
