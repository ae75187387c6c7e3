"""Do runs on this machine: side by side where they can be, each with its log, whatever other runners do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mapet_mm.experiments.perform import StageError, is_claimed, is_done, perform_words, record_of
from mapet_mm.experiments.plan import Run

TAIL_LINES = 20
POLL_SECONDS = 0.2
REPORT_SECONDS = 30


@dataclass
class _Running:
    run: Run
    process: subprocess.Popen
    reported: float = field(default_factory=time.monotonic)


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
        on_done: Callable[[Run], None] = lambda run: None,
    ) -> None:
        if jobs < 1:
            raise StageError(f"{jobs} runs at a time do nothing: 1 or more")
        self.runs, self.jobs, self.launcher, self.cpus = list(runs), jobs, launcher, cpus
        self.tell, self.on_done = tell, on_done
        self.failed: dict[str, str] = {}

    def run(self) -> None:
        """Do what is not done.

        Raises:
            StageError: runs failed; raised after all others, with the ends of their logs.
        """
        done = {run.folder for run in self.runs if is_done(run)}
        waiting = [run for run in self.runs if run.folder not in done]
        if done:
            self.tell(f"{len(done)} of {len(self.runs)} runs were done before")
        running: list[_Running] = []
        elsewhere: set[str] = set()
        try:
            while waiting or running:
                self._start(waiting, running, done, elsewhere)
                time.sleep(POLL_SECONDS)
                self._collect(waiting, running, done)
                self._report(running)
        finally:
            _stop(running)
        if self.failed:
            raise StageError("\n".join(self.failed.values()))

    def _start(
        self, waiting: list[Run], running: list[_Running], done: set[str], elsewhere: set[str]
    ) -> None:
        for run in [run for run in waiting if done.issuperset(run.needs)]:
            if len(running) == self.jobs:
                return
            if is_claimed(run):
                if run.folder not in elsewhere:
                    self._say(run, "another runner is at it")
                elsewhere.add(run.folder)
                continue
            waiting.remove(run)
            if run.folder in elsewhere and is_done(run):
                self._done(run, done, "done by another runner")
                continue
            self._say(run, run.line)
            running.append(_Running(run, self._process(run)))

    def _process(self, run: Run) -> subprocess.Popen:
        os.makedirs(run.folder, exist_ok=True)
        with open(log_of(run), "a") as log:
            words = perform_words(run, self.launcher, self.cpus)
            # A session of its own: Ctrl-C reaches this process alone, which stops the run and its workers.
            return subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)

    def _collect(self, waiting: list[Run], running: list[_Running], done: set[str]) -> None:
        for one in [one for one in running if one.process.poll() is not None]:
            running.remove(one)
            if one.process.returncode:
                self._fail(one.run, one.process.returncode, waiting)
                continue
            left = self._seconds_left([*waiting, *(other.run for other in running)])
            self._done(one.run, done, f"done in {record_of(one.run)['seconds']:.0f} s{left}")

    def _done(self, run: Run, done: set[str], how: str) -> None:
        done.add(run.folder)
        self._say(run, how)
        self.on_done(run)

    def _fail(self, run: Run, code: int, waiting: list[Run]) -> None:
        """Note a failure, and drop what needs the run."""
        tail = "\n".join(f"  | {line}" for line in _tail(run, TAIL_LINES))
        self.failed[run.folder] = (
            f"`{run.name}` ended with code {code}; the end of its log:\n{tail}\n"
            f"The whole log is {log_of(run)}. Correct the cause and run the same command again: what is done "
            "is not done again, this one resumes."
        )
        self._say(run, self.failed[run.folder])
        for other in list(waiting):
            if broken := [need for need in other.needs if need in self.failed]:
                waiting.remove(other)
                self.failed[other.folder] = (
                    f"`{other.name}` was not done: it needs {os.path.basename(broken[0])}"
                )

    def _seconds_left(self, runs: Sequence[Run]) -> str:
        """How long these will take, from the mean of those of the same config, or of all, that are done."""
        taken: dict[str | None, list[float]] = {}
        for run in self.runs:
            if record := record_of(run):
                for kind in (run.config or run.name, None):
                    taken.setdefault(kind, []).append(record["seconds"])
        expected = [taken.get(run.config or run.name, taken[None]) for run in runs]
        seconds = sum(sum(times) / len(times) for times in expected) / self.jobs
        return f"; about {seconds / 60:.0f} min left for {len(runs)} more" if runs else ""

    def _report(self, running: Sequence[_Running]) -> None:
        for one in running:
            if time.monotonic() - one.reported >= REPORT_SECONDS:
                one.reported = time.monotonic()
                # MMEngine puts time, logger and level before its message.
                state = " ".join(_tail(one.run, 1)).rsplit(" - INFO - ", 1)[-1]
                self._say(one.run, " ".join(state.split())[:90])

    def _say(self, run: Run, text: str) -> None:
        self.tell(f"[{self.runs.index(run) + 1:2d}/{len(self.runs)}] {run.name}: {text}")


def log_of(run: Run) -> Path:
    """The log of what a run's tool has said, over all its starts."""
    return Path(run.folder, "run.log")


def _stop(running: Sequence[_Running]) -> None:
    for one in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGTERM)
    for one in running:
        try:
            one.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(one.process.pid, signal.SIGKILL)


def _tail(run: Run, count: int) -> list[str]:
    text = log_of(run).read_text(errors="replace") if log_of(run).is_file() else ""
    # A progress bar redraws its line after carriage returns; the last state is the one to show.
    return [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.rstrip("\n").split("\n")][-count:]
