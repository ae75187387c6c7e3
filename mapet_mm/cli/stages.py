"""Stages of a long job: each is a command that resumes by itself, with a progress line and a log."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

from mapet_mm.cli.claims import end_with_runner
from mapet_mm.utils.errors import UserError

ETA = re.compile(r"eta: ((?:\d+ days?, )?\d+:\d\d:\d\d)")  # MMEngine's format
REDRAW_SECONDS = 0.2


class Terminated(SystemExit):
    """The process was told to end, by SIGTERM."""


@dataclass
class Stage:
    """One stage of a job.

    Args:
        title: one or two words.
        command: to run in the job's folder; must resume by itself, and be quick once all is done.
        shown: the command as a user would type it there.
    """

    title: str
    command: Sequence[str]
    shown: str


def run_stages(stages: Sequence[Stage], folder: Path, claim: TextIO) -> None:
    """Run the stages in a folder; a stage's output goes to `logs/<number>-<title>.log` there.

    Args:
        stages: in order.
        folder: where they run.
        claim: file that the stages' processes keep open.

    Raises:
        UserError: a stage failed; the message has its last line and the path of its log.
        Terminated: SIGTERM came; the stage has ended, too.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    width = max(len(stage.title) for stage in stages)
    with _terminable():
        for number, stage in enumerate(stages, 1):
            head = f"[{number}/{len(stages)}] {stage.title:{width}}"
            print(f"{head}  {stage.shown}", flush=True)
            start = time.monotonic()
            log = folder / "logs" / f"{number}-{stage.title.replace(' ', '-')}.log"
            _run(stage, head, folder, log, claim)
            print(f"{head}  done in {_clock(time.monotonic() - start)}", flush=True)


@contextmanager
def _terminable() -> Iterator[None]:
    """Raise Terminated where SIGTERM comes."""

    def end(number: int, frame: object) -> None:
        raise Terminated(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(stage: Stage, head: str, folder: Path, log: Path, claim: TextIO) -> None:
    with open(log, "ab") as file:
        process = subprocess.Popen(
            stage.command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},  # lines at once, and an error behind them
            pass_fds=[claim.fileno()],
            preexec_fn=end_with_runner,
        )
        try:
            last = _watch(_lines(process.stdout, file), head)
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


def _watch(lines: Iterator[str], head: str) -> str:
    """Show a stage's lines as its progress until it ends; the last one is returned."""
    last, drawn, told = "", 0.0, False
    is_terminal = sys.stdout.isatty()
    for last in lines:
        if not told and (match := ETA.search(last)):
            told = True
            print(f"{head}  about {match[1]} left", flush=True)
        if is_terminal and time.monotonic() - drawn > REDRAW_SECONDS:
            drawn, columns = time.monotonic(), shutil.get_terminal_size().columns - 1
            print(f"\r{f'{head}  {last}'[:columns]:{columns}}", end="\r", flush=True)
    if is_terminal:
        print(f"\r{'':{shutil.get_terminal_size().columns - 1}}", end="\r")
    return last


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


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
