"""Do runs on this machine, in parallel where possible, each with its own log; safe beside other runners.

    python -m mapet_mm.experiments.local LAUNCHER CPUS '{"command": ["tools/train.py", ...], ...}'

is how a cluster job does its one run. An interrupted run continues from where its tool resumes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import NamedTuple, TextIO

from mapet_mm.experiments.commands import end_with_runner, launch_words
from mapet_mm.experiments.plan import Run
from mapet_mm.experiments.recipes import FEATURES
from mapet_mm.experiments.records import (
    StageError,
    check_identity,
    claim,
    is_adopted,
    is_done,
    log_of,
    note_seconds,
    record_of,
    seconds_of,
    write_record,
)
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.config import VARIABLE
from mapet_mm.utils.errors import STOPPED, UserError, one_line_errors

TAIL_LINES = 20
POLL_SECONDS = 0.2
REPORT_SECONDS = 30


class StoppedError(StageError):
    """A signal told the run to end; it resumes when it is started again."""


class _Running(NamedTuple):
    run: Run
    process: subprocess.Popen
    claim: TextIO
    started: float
    before: float  # seconds of earlier starts

    @property
    def seconds(self) -> float:
        """Seconds that all starts of the run have taken."""
        return self.before + time.monotonic() - self.started


class LocalRunner:
    """Does runs in processes of this machine; a failure stops only the runs that need the failed one.

    If another runner is doing a run, this one does others and then waits for it. On Ctrl-C, or when this
    process is killed, its runs end; a new runner continues them.

    Args:
        runs: in an order in which each follows those that it needs.
        jobs: number of runs at once.
        launcher: 'local', 'dist', or 'slurm' inside a job.
        cpus: threads of each process. A fixed number keeps results independent of the number of cores; on a
            busy machine, threads that wait for each other are slower than one.
        tell: called with each line of progress.
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
        on_done: Callable[[], object] = lambda: None,
    ) -> None:
        if jobs < 1:
            raise StageError(f"{jobs} runs at a time do nothing: 1 or more")
        self.runs, self.jobs, self.launcher, self.cpus = list(runs), jobs, launcher, cpus
        self.tell, self.on_done = tell, on_done
        self.waiting = [run for run in runs if not is_done(run)]
        self.running: list[_Running] = []
        self.elsewhere: set[str] = set()
        self.failed: dict[str, str] = {}
        self.told: list[int] = []

    def run(self) -> None:
        """Do all runs that are not done.

        Raises:
            StageError: some runs failed; raised after all others, with the ends of their logs.
            StoppedError: a run was told to end.
        """
        if before := len(self.runs) - len(self.waiting):
            self.tell(f"{before} of {len(self.runs)} runs were done before")
        reported = time.monotonic()
        try:
            while self.waiting or self.running:
                self._start()
                time.sleep(POLL_SECONDS)
                self._collect()
                if time.monotonic() - reported >= REPORT_SECONDS:
                    reported = time.monotonic()
                    self._report()
        finally:
            self._stop()
        if self.failed:
            raise StageError("\n".join(self.failed.values()))

    def _start(self) -> None:
        for run in list(self.waiting):
            missing = {other.folder for other in (*self.waiting, *(one.run for one in self.running))}
            if run not in self.waiting or len(self.running) == self.jobs or missing.intersection(run.needs):
                continue
            if (held := claim(run.folder)) is None:
                if run.folder not in self.elsewhere:
                    self._say(run, "another runner is at it")
                self.elsewhere.add(run.folder)
            else:
                self.waiting.remove(run)
                self._begin(run, held)

    def _begin(self, run: Run, held: TextIO) -> None:
        """Start a claimed run's tool, unless its outputs exist."""
        Path(run.folder, "failed").unlink(missing_ok=True)
        try:
            check_identity(run)
            if is_done(run):
                self._done(run, "done by another runner")
            elif is_adopted(run):
                write_record(run, 0)
                self._done(run, f"{run.outputs[0]} was made with this recipe: it is kept")
            else:
                self._say(run, run.line)
                before, process = seconds_of(run), self._process(run, held)
                self.running.append(_Running(run, process, held, time.monotonic(), before))
                return
        except UserError as error:
            self._fail(run, str(error))
        held.close()

    def _process(self, run: Run, held: TextIO) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.cpus), "PYTHON": sys.executable}
        environment["PYTHONUNBUFFERED"] = "1"  # lines at once, and an error behind them
        environment |= {VARIABLE: run.data} if run.data else {}
        with open(log_of(run), "a") as log:
            return subprocess.Popen(
                launch_words(run, self.launcher, self.cpus),
                env=environment,
                stdout=log,
                stderr=log,
                # In its own session, so Ctrl-C reaches only this process, which also stops the tool's
                # workers.
                start_new_session=True,
                # The tool keeps the claim if this process is killed first.
                pass_fds=[held.fileno()],
                preexec_fn=end_with_runner,
            )

    def _collect(self) -> None:
        for one in [one for one in self.running if one.process.poll() is not None]:
            self.running.remove(one)
            run, code = one.run, one.process.returncode
            note_seconds(run, one.seconds)
            missing = [output for output in run.outputs if not os.path.exists(output)]
            if code and (self.told or code == STOPPED):
                raise StoppedError(f"{run.command[0]} was told to end: the same command goes on")
            if code or missing:
                self._fail(
                    run, _failure(run, f"ended with code {code}" if code else f"did not write {missing[0]}")
                )
            else:
                write_record(run, one.seconds)
                shutil.rmtree(Path(run.folder, FEATURES), ignore_errors=True)  # measured, and large
                self._done(run, f"done in {one.seconds:.0f} s{self._time_left()}")
            one.claim.close()

    def _report(self) -> None:
        """Note the time of each run that is done now, and show the last line of its log."""
        for one in self.running:
            note_seconds(one.run, one.seconds)
            # Without the time, logger and level that MMEngine puts before the message.
            last = _tail(one.run, 1)[0].rsplit(" - INFO - ", 1)[-1]
            self._say(one.run, " ".join(last.split())[:90])

    def _done(self, run: Run, how: str) -> None:
        self._say(run, how)
        self.on_done()

    def _fail(self, run: Run, why: str) -> None:
        """Record a failure where other runners see it, and drop the runs that need this one."""
        replace_file(Path(run.folder, "failed"), f"{why}\n".encode())
        self.failed[run.folder] = f"`{run.name}`: {why}"
        self._say(run, why)
        for other in list(self.waiting):
            if broken := [os.path.basename(need) for need in other.needs if need in self.failed]:
                self.waiting.remove(other)
                self.failed[other.folder] = f"`{other.name}` was not done: it needs {broken[0]}"

    def _time_left(self) -> str:
        """Time left, estimated from the mean of completed runs of the same config, else of all."""
        taken: dict[str | None, list[float]] = defaultdict(list)
        for run in self.runs:
            if record := record_of(run):
                taken[run.config].append(record["seconds"])
        rest = [*self.waiting, *(one.run for one in self.running)]
        overall = mean(chain(*taken.values()))
        seconds = sum(mean(taken.get(run.config, [overall])) for run in rest) / self.jobs
        return f"; about {seconds / 60:.0f} min left for {len(rest)} more" if rest else ""

    def pass_on(self, number: int, _: object) -> None:
        """Handler of the signals with which Slurm ends a job: its tool saves and ends."""
        self.told.append(number)
        for one in self.running:
            one.process.send_signal(number)

    def _say(self, run: Run, text: str) -> None:
        self.tell(f"[{self.runs.index(run) + 1:2d}/{len(self.runs)}] {run.name}: {text}")

    def _stop(self) -> None:
        for one in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGTERM)
        for one in self.running:
            try:
                one.process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(one.process.pid, signal.SIGKILL)
                one.process.wait()
            note_seconds(one.run, one.seconds)
            one.claim.close()


def _failure(run: Run, what: str) -> str:
    tail = "\n".join(f"  | {line}" for line in _tail(run, TAIL_LINES))
    return (
        f"{what}; the end of its log:\n{tail}\nThe whole log is {log_of(run)}. Correct the cause and run the "
        "same command again: what is done is not done again, this one resumes."
    )


def _tail(run: Run, count: int) -> list[str]:
    text = log_of(run).read_text(errors="replace") if log_of(run).is_file() else ""
    # A progress bar redraws its line after carriage returns; only its last state is shown.
    return [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.rstrip("\n").split("\n")][-count:]


@one_line_errors
def main() -> None:
    """Do the run that the command line describes, as a job of a cluster."""
    launcher, cpus, run = sys.argv[1:]
    runner = LocalRunner([Run(**json.loads(run))], 1, launcher, int(cpus))
    before = {number: signal.signal(number, runner.pass_on) for number in (signal.SIGUSR1, signal.SIGTERM)}
    try:
        runner.run()
    except StoppedError as error:
        print(error, flush=True)
        # The job has reached its time limit. Of jobs that end by SIGTERM, Slurm requeues those that it
        # preempted, but not those that were cancelled.
        if signal.SIGUSR1 in runner.told[:1] and (job := os.environ.get("SLURM_JOB_ID")):
            subprocess.run(["scontrol", "requeue", job], check=False)
        sys.exit(STOPPED)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
