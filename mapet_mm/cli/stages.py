"""Stages of a long job: each is a command that resumes by itself."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TextIO

from mapet_mm.utils.commands import STAGE
from mapet_mm.utils.errors import STOPPED, UserError


@dataclass
class Stage:
    """One stage of a job: a command to run in the job's folder, which resumes by itself."""

    title: str
    command: Sequence[str]
    shown: str  # as a user would type it there


def claim(folder: Path) -> TextIO | None:
    """Open a file that claims a folder until it is closed; None if it is claimed already."""
    from mapet_mm.utils.shared_work import has_locks

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "claim"
    file = open(path, "a")  # noqa: SIM115
    if has_locks(path):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
    return file


def run_stages(stages: Sequence[Stage], folder: Path, held: TextIO) -> None:
    """Run the stages in a folder, whose claim their processes keep, too; what they print is seen as it comes.

    Raises:
        UserError: a stage failed, and has said why.
        SystemExit: a signal ended this process or a stage.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()  # others take no signals
    if in_main_thread:
        before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        _run_each(stages, folder, held)
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, before)


def _run_each(stages: Sequence[Stage], folder: Path, held: TextIO) -> None:
    """Run the stages one after the other, and say how long each took."""
    for step, stage in enumerate(stages, 1):
        start = time.monotonic()
        head = f"[{step}/{len(stages)}] {stage.title}"
        print(f"{head}: {stage.shown}", flush=True)
        environment = {**os.environ, STAGE: stage.title}
        process = subprocess.Popen(stage.command, cwd=folder, env=environment, pass_fds=[held.fileno()])
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()  # a training saves where it stands, and says so
            raise
        if code == STOPPED:  # by a signal, as it has said
            sys.exit(code)
        if code:
            raise UserError(
                f"{stage.title}: exit code {code}, for the reason above. Correct the cause, then run "
                "the same command again to continue."
            )
        print(f"{head}: done in {timedelta(seconds=round(time.monotonic() - start))}", flush=True)
