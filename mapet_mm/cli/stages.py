"""Stages of a long job: each is a command that resumes by itself."""

from __future__ import annotations

import fcntl
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TextIO

from mapet_mm.utils.commands import STAGE, environment_of_tools, tool_command
from mapet_mm.utils.errors import STOPPED, UserError, one_line_errors
from mapet_mm.utils.signals import listen


@dataclass
class Stage:
    """One stage of a job: a command to run in the job's folder, which resumes by itself."""

    title: str
    command: Sequence[str]
    shown: str  # as a user would type it there


def stage_of(title: str, processes: int, tool: str, *arguments: str | Path) -> Stage:
    """A stage that runs one of the package's tools, in so many processes."""
    words = [str(argument) for argument in arguments]
    several = ["--processes", str(processes)] if processes > 1 else []
    shown = shlex.join(["mapet-mm", *several, tool, *words])
    return Stage(title, tool_command(tool, words, processes), shown)


def run_job(job: Callable[[], None]) -> None:
    """Do a long job; errors that a user can correct are one line, and a signal ends it with exit code 75."""
    stop_listening = listen(_stop)
    try:
        one_line_errors(job)()
    finally:
        stop_listening()


def _stop(number: int, frame: FrameType | None) -> None:
    """End at a signal that comes between the stages; while one runs, `run_stages` takes them."""
    name = signal.Signals(number).name
    print(f"\n{name}: stopped. Run the same command again to continue.", file=sys.stderr)
    sys.exit(STOPPED)


def begin(folder: Path, command: str, num_workers: int) -> TextIO:
    """Refuse what no job can do on this machine, and claim its folder; see `claim`."""
    from mapet_mm.utils.dist import run_alone
    from mapet_mm.utils.gpus import require_usable_gpu
    from mapet_mm.utils.loader_workers import usable_workers

    run_alone()
    require_usable_gpu()  # what is chosen and written depends on it
    usable_workers(num_workers, batch_bytes=lambda: 0)  # each loader looks at its own batches
    return claim(folder, command)


def claim(folder: Path, command: str) -> TextIO:
    """Open a file that claims a folder for a command until it is closed; UserError if another claims it."""
    from mapet_mm.utils.shared_work import has_locks

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "claim"
    file = open(path, "a")  # noqa: SIM115
    if has_locks(path):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UserError(f"{folder}: another `mapet-mm {command}` is at work there") from None
    return file


def run_stages(stages: Sequence[Stage], folder: Path, held: TextIO) -> None:
    """Run the stages in a folder, whose claim their processes keep, too; what they print is seen as it comes.

    A signal is passed on to the stage that runs: a training saves where it stands, and says so.

    Raises:
        UserError: a stage failed, and has said why.
        SystemExit: a signal ended this process or a stage; with code 75, as that of a training.
    """
    received: list[int] = []
    running: list[subprocess.Popen] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for process in running:
            process.send_signal(number)

    stop_listening = listen(pass_on)
    try:
        for step, stage in enumerate(stages, 1):
            start = time.monotonic()
            head = f"[{step}/{len(stages)}] {stage.title}"
            print(f"{head}: {stage.shown}", flush=True)
            environment = {**environment_of_tools(), STAGE: stage.title}
            process = subprocess.Popen(stage.command, cwd=folder, env=environment, pass_fds=[held.fileno()])
            running[:] = [process]
            for number in received:  # while it started
                process.send_signal(number)
            code = process.wait()
            running.clear()
            _require_success(stage, code, received)
            print(f"{head}: done in {timedelta(seconds=round(time.monotonic() - start))}", flush=True)
    finally:
        stop_listening()


def _require_success(stage: Stage, code: int, received: Sequence[int]) -> None:
    """End this process if a signal ended a stage, or came while it ran, or if the stage failed.

    A stage that a signal meets while Python starts ends with any code.
    """
    if code == STOPPED or received:
        if code != STOPPED:  # a training has said so itself
            print("stopped. Run the same command again to continue.", flush=True)
        sys.exit(STOPPED)
    if code:
        raise UserError(
            f"{stage.title}: exit code {code}, for the reason above. Correct the cause, then run "
            "the same command again to continue."
        )
