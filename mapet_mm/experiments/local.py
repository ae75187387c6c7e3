"""Do runs on this machine: side by side where they can be, each with its log, whatever other runners do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

from mapet_mm.experiments.perform import StageError, is_claimed, is_done, perform_words, record_of
from mapet_mm.experiments.plan import Run

TAIL_LINES = 20
POLL_SECONDS = 0.2
REPORT_SECONDS = 30


class LocalRunner:
    """Does runs in processes of this machine; what fails costs only what needs it.

    A run that another runner is doing is waited for, while others can be done. On Ctrl-C, and when this
    process is killed, its runs end; a new runner goes on.

    Args:
        runs: each after the ones that it needs.
        jobs: how many at a time.
        launcher: 'local' or 'dist'.
        cpus: threads of each process: on a busy machine, threads that wait for each other are slower than
            one, and results do not depend on the number of cores.
        tell: takes each line of progress.
        on_done: called after each run that is done.

    Raises:
        StageError: fewer than one job.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        jobs: int = 1,
        launcher: str = "local",
        cpus: int = 1,
        tell: Callable[[str], None] = print,
        on_done: Callable[[Run], object] = lambda run: None,
    ) -> None:
        if jobs < 1:
            raise StageError(f"{jobs} runs at a time do nothing: 1 or more")
        self.runs, self.jobs, self.launcher, self.cpus = list(runs), jobs, launcher, cpus
        self.tell, self.on_done = tell, on_done
        self.done = {run.folder for run in runs if is_done(run)}
        self.waiting = [run for run in runs if run.folder not in self.done]
        self.running: list[tuple[Run, subprocess.Popen]] = []
        self.elsewhere: set[str] = set()
        self.failed: dict[str, str] = {}

    def run(self) -> None:
        """Do what is not done.

        Raises:
            StageError: runs failed; raised after all others, with the ends of their logs.
        """
        if self.done:
            self.tell(f"{len(self.done)} of {len(self.runs)} runs were done before")
        reported = time.monotonic()
        try:
            while self.waiting or self.running:
                self._start()
                time.sleep(POLL_SECONDS)
                self._collect()
                if time.monotonic() - reported >= REPORT_SECONDS:
                    reported = time.monotonic()
                    for run, _ in self.running:
                        self._say(run, _last_words(run))
        finally:
            self._stop()
        if self.failed:
            raise StageError("\n".join(self.failed.values()))

    def _start(self) -> None:
        for run in [run for run in self.waiting if self.done.issuperset(run.needs)]:
            if len(self.running) == self.jobs:
                return
            if is_claimed(run):
                if run.folder not in self.elsewhere:
                    self._say(run, "another runner is at it")
                self.elsewhere.add(run.folder)
                continue
            self.waiting.remove(run)
            if run.folder in self.elsewhere and is_done(run):
                self._done(run, "done by another runner")
                continue
            self._say(run, run.line)
            os.makedirs(run.folder, exist_ok=True)
            with open(log_of(run), "a") as log:
                words = perform_words(run, self.launcher, self.cpus)
                # A session of its own: Ctrl-C reaches this process alone, which stops the run's workers too.
                process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
            self.running.append((run, process))

    def _collect(self) -> None:
        for run, process in [one for one in self.running if one[1].poll() is not None]:
            self.running.remove((run, process))
            if process.returncode:
                self._fail(run, process.returncode)
            else:
                left = self._time_left([*self.waiting, *(other for other, _ in self.running)])
                self._done(run, f"done in {record_of(run)['seconds']:.0f} s{left}")

    def _done(self, run: Run, how: str) -> None:
        self.done.add(run.folder)
        self._say(run, how)
        self.on_done(run)

    def _fail(self, run: Run, code: int) -> None:
        """Note a failure, and drop what needs the run."""
        tail = "\n".join(f"  | {line}" for line in _tail(run, TAIL_LINES))
        self.failed[run.folder] = (
            f"`{run.name}` ended with code {code}; the end of its log:\n{tail}\n"
            f"The whole log is {log_of(run)}. Correct the cause and run the same command again: what is done "
            "is not done again, this one resumes."
        )
        self._say(run, self.failed[run.folder])
        for other in list(self.waiting):
            if broken := [os.path.basename(need) for need in other.needs if need in self.failed]:
                self.waiting.remove(other)
                self.failed[other.folder] = f"`{other.name}` was not done: it needs {broken[0]}"

    def _time_left(self, runs: Sequence[Run]) -> str:
        """How long these will take, from the mean of those of the same config, or of all, that are done."""
        taken: dict[str | None, list[float]] = {}
        for run in self.runs:
            if record := record_of(run):
                for kind in (run.config, "all"):
                    taken.setdefault(kind, []).append(record["seconds"])
        seconds = sum(mean(taken.get(run.config, taken["all"])) for run in runs) / self.jobs
        return f"; about {seconds / 60:.0f} min left for {len(runs)} more" if runs else ""

    def _say(self, run: Run, text: str) -> None:
        self.tell(f"[{self.runs.index(run) + 1:2d}/{len(self.runs)}] {run.name}: {text}")

    def _stop(self) -> None:
        for _, process in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for _, process in self.running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def log_of(run: Run) -> Path:
    """The log of what a run's tool has said, over all its starts."""
    return Path(run.folder, "run.log")


def _tail(run: Run, count: int) -> list[str]:
    text = log_of(run).read_text(errors="replace") if log_of(run).is_file() else ""
    # A progress bar redraws its line after carriage returns; the last state is the one to show.
    return [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.rstrip("\n").split("\n")][-count:]


def _last_words(run: Run) -> str:
    """The end of a run's log without the time, logger and level that MMEngine puts before its message."""
    return " ".join(_tail(run, 1)[0].rsplit(" - INFO - ", 1)[-1].split())[:90]
