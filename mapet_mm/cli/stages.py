"""Stages of a long job: each is a command that resumes by itself, with a progress line and a log."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, TextIO

from mapet_mm.utils.errors import UserError

REDRAW_SECONDS = 0.2


@dataclass
class Stage:
    """One stage of a job: a command to run in the job's folder, which resumes by itself."""

    title: str
    command: Sequence[str]
    shown: str  # as a user would type it there


def claim(folder: Path) -> TextIO | None:
    """Open a file that claims a folder for this process until it ends; None if another has claimed it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / "claim", "a")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def run_stages(stages: Sequence[Stage], folder: Path, held: TextIO) -> None:
    """Run the stages in a folder; a stage's output goes to `logs/<number>-<title>.log` there.

    The stages' processes keep the folder's claim, too.

    Raises:
        UserError: a stage failed; the message has its last line and the path of its log.
        SystemExit: SIGTERM came; the stage has ended, too.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    width = max(len(stage.title) for stage in stages)
    for number, stage in enumerate(stages, 1):
        head = f"[{number}/{len(stages)}] {stage.title:{width}}"
        print(f"{head}  {stage.shown}", flush=True)
        start = time.monotonic()
        _run(stage, head, folder, folder / "logs" / f"{number}-{stage.title.replace(' ', '-')}.log", held)
        print(f"{head}  done in {timedelta(seconds=round(time.monotonic() - start))}", flush=True)


def _run(stage: Stage, head: str, folder: Path, log: Path, held: TextIO) -> None:
    with open(log, "ab") as file:
        process = subprocess.Popen(
            stage.command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},  # lines at once, and an error behind them
            pass_fds=[held.fileno()],
        )
        last, drawn = "", 0.0
        try:
            for last in _lines(process.stdout, file):
                if sys.stdout.isatty() and time.monotonic() - drawn > REDRAW_SECONDS:
                    drawn, columns = time.monotonic(), shutil.get_terminal_size().columns - 1
                    print(f"\r{f'{head}  {last}'[:columns]:{columns}}", end="\r", flush=True)
        except BaseException:
            process.terminate()
            said = list(_lines(process.stdout, file))  # a training saves where it stands
            process.wait()
            print(f"{head}  stopped: {said[-1] if said else 'it said nothing more'}", flush=True)
            raise
        if process.wait():
            reason = last.removeprefix("error: ") or f"exit code {process.returncode}"
            raise UserError(
                f"{stage.title}: {reason} (all it said: {log}; once the cause is corrected, the same command "
                "goes on from here)"
            )


def _lines(output: IO[bytes], copy: IO[bytes]) -> Iterator[str]:
    """Lines of a process's output as they arrive, including progress bars; all output is copied."""
    rest = b""
    while block := output.read1():
        copy.write(block)
        copy.flush()
        *whole, rest = re.split(rb"[\r\n]", rest + block)
        # A progress bar's text is complete at the next carriage return, a line's at its end.
        yield from (text for line in whole if (text := line.decode(errors="replace").strip()))
    if text := rest.decode(errors="replace").strip():
        yield text
