"""Stages of a long job: each is a separate command, with a progress line and the time left."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

from mapet_mm.cli.claims import end_with_runner
from mapet_mm.utils.errors import UserError

PERCENT = re.compile(r"(\d+)%\|")  # tqdm's format
ETA = re.compile(r"eta: (?:(\d+) days?, )?(\d+):(\d\d):(\d\d)")  # MMEngine's format
REDRAW_SECONDS = 0.2


@dataclass
class Stage:
    """One stage of a job.

    Args:
        title: one or two words.
        command: to run; must resume by itself.
        shown: the command as a user would type it.
        result: the file or folder that the stage makes.
        there: returns what there is to say where the stage is done ('' for nothing), and None where it is to
            be run; by default, it is done if the result exists.
        made: called once the command has made the result.
        seconds: estimate of the time that it takes; None where it is not known.
    """

    title: str
    command: Sequence[str]
    shown: str
    result: Path
    there: Callable[[], str | None] | None = None
    made: Callable[[], None] = lambda: None
    seconds: float | None = None


def run_stages(stages: Sequence[Stage], logs: Path, claim: TextIO | None = None) -> None:
    """Run the stages that are not done; a stage's output goes to a log file.

    Args:
        stages: in order.
        logs: folder for `<number>-<title>.log`.
        claim: file that the stages' processes keep open.

    Raises:
        UserError: a stage failed; the message has its last line and the path of its log.
    """
    logs.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        if stage.seconds:
            print(f"{stage.title} will take about {_clock(stage.seconds)} on this machine", flush=True)
    width = max(len(stage.title) for stage in stages)
    for number, stage in enumerate(stages, 1):
        head = f"[{number}/{len(stages)}] {stage.title:{width}}"
        said = stage.there() if stage.there else "" if stage.result.exists() else None
        if said is not None:
            print(f"{head}  is there: {stage.result}{said and f' ({said})'}", flush=True)
            continue
        print(f"{head}  {stage.shown}", flush=True)
        later = sum(each.seconds or 0 for each in stages[number:]) if number > 1 else None
        _run(stage, head, later, logs / f"{number}-{stage.title.replace(' ', '-')}.log", claim)


def _run(stage: Stage, head: str, later: float | None, log: Path, claim: TextIO | None) -> None:
    start = time.monotonic()
    with open(log, "ab") as file:
        process = subprocess.Popen(
            stage.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},  # lines at once, and an error behind them
            pass_fds=[claim.fileno()] if claim else [],
            preexec_fn=end_with_runner,
        )
        try:
            last = _watch(_lines(process.stdout, file), head, later)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if process.wait():
            reason = last.removeprefix("error: ") or f"exit code {process.returncode}"
            raise UserError(
                f"{stage.title}: {reason} (all it said: {log}; once the cause is corrected, the same command "
                "goes on from here)"
            )
    stage.made()
    print(f"{head}  done in {_clock(time.monotonic() - start)}: {stage.result}", flush=True)


def _watch(lines: Iterable[str], head: str, later: float | None) -> str:
    """Show a stage's lines as its progress until it ends; the last one is returned."""
    start, last, drawn = time.monotonic(), "", 0.0
    try:
        for last in lines:
            if time.monotonic() - drawn > REDRAW_SECONDS:
                drawn = time.monotonic()
                _draw(head, last, _left(last, drawn - start), later)
    finally:
        _draw()
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


def _left(line: str, elapsed: float) -> float | None:
    """Seconds left in a stage, from its own progress line."""
    if match := ETA.search(line):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((24 * days + hours) * 60 + minutes) * 60 + seconds
    if (match := PERCENT.search(line)) and int(match[1]):
        return elapsed * (100 / int(match[1]) - 1)
    return None


def _draw(head: str = "", line: str = "", left: float | None = None, later: float | None = None) -> None:
    """Draw or clear the progress line, in terminals only."""
    if not sys.stdout.isatty():
        return
    known = left is not None and later is not None
    text = f"{head}  {f'{_clock(left + later)} left in all | ' if known else ''}{line}" if head else ""
    columns = shutil.get_terminal_size().columns - 1
    sys.stdout.write(f"\r{text[:columns]:{columns}}\r")
    sys.stdout.flush()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
