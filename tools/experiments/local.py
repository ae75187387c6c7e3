"""Do runs on this machine, in parallel where possible, each with its own log; safe beside other runners."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from experiments.plan import FEATURES, TRAIN, Run
from experiments.records import (
    StageError,
    check_identity,
    claim,
    is_done,
    note_seconds,
    seconds_of,
    write_record,
)

from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.config import VARIABLE
from mapet_mm.utils.errors import STOPPED, UserError

LOG = "run.log"  # of a run's tool, over all its starts
TAIL_LINES = 20
POLL_SECONDS = 0.2
REPORT_SECONDS = 30
PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it


class StoppedError(StageError):
    """A signal told the run to end; it resumes when it is started again."""


class _Running(NamedTuple):
    run: Run
    process: subprocess.Popen
    claim: TextIO
    started: float  # this far in the past, had there been one start only

    def note(self) -> float:
        """Note and return the seconds that all starts of the run have taken."""
        seconds = time.monotonic() - self.started
        note_seconds(self.run, seconds)
        return seconds


class LocalRunner:
    """Does runs in processes of this machine; a failure stops only the runs that need the failed one.

    If another runner is doing a run, this one does others and then waits for it. On Ctrl-C, or when this
    process is killed, its runs end; a new runner continues them.

    Args:
        runs: each after the runs that it needs; `jobs` of them run at once.
        launcher: 'local', 'dist', or 'slurm' inside a job.
        cpus: threads of each process, a fixed number, so that results do not depend on the number of cores.
        tell: called with each line of progress; `on_done` after each run that is done.
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
                    for one in self.running:
                        one.note()
                        self._say(one.run, " ".join(_tail(one.run, 1)[0].split())[:120])
        finally:
            self._stop()
        if self.failed:
            raise StageError("\n".join(self.failed.values()))

    def _start(self) -> None:
        """Start runs whose needs are done, up to the number of jobs."""
        for run in list(self.waiting):
            missing = {other.folder for other in (*self.waiting, *(one.run for one in self.running))}
            if run not in self.waiting or len(self.running) == self.jobs or missing.intersection(run.needs):
                continue
            if held := claim(run.folder):
                self.waiting.remove(run)
                self._begin(run, held)
            elif run.folder not in self.elsewhere:
                self.elsewhere.add(run.folder)
                self._say(run, "another runner is at it")

    def _begin(self, run: Run, held: TextIO) -> None:
        """Start a claimed run's tool, unless its outputs exist."""
        Path(run.folder, "failed").unlink(missing_ok=True)
        try:
            check_identity(run)
            if is_done(run):
                self._done(run, "done by another runner")
            else:
                self._say(run, run.line)
                started = time.monotonic() - seconds_of(run)
                self.running.append(_Running(run, self._process(run, held), held, started))
                return
        except UserError as error:
            self._fail(run, str(error))
        held.close()

    def _process(self, run: Run, held: TextIO) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.cpus), "PYTHON": sys.executable}
        environment["PYTHONUNBUFFERED"] = "1"  # lines at once, and an error behind them
        environment |= {VARIABLE: run.data} if run.data else {}
        with open(Path(run.folder, LOG), "a") as log:
            return subprocess.Popen(
                launch_words(run, self.launcher, self.cpus),
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches only this process, which stops all of the tool
                pass_fds=[held.fileno()],  # the tool keeps the claim if this process is killed first
                preexec_fn=end_with_runner,
            )

    def _collect(self) -> None:
        """Record the runs whose tools have ended."""
        for one in [one for one in self.running if one.process.poll() is not None]:
            self.running.remove(one)
            run, code, seconds = one.run, one.process.returncode, one.note()
            missing = [output for output in run.outputs if not os.path.exists(output)]
            if code and (self.told or code == STOPPED):
                raise StoppedError(f"{run.command[0]} was told to end: the same command resumes")
            if code or missing:
                what = f"ended with code {code}" if code else f"did not write {missing[0]}"
                lines = [f"{what}; the end of its log:", *(f"  | {line}" for line in _tail(run, TAIL_LINES))]
                lines.append(
                    f"The whole log is {run.folder}/{LOG}: correct the cause and run the command again"
                )
                self._fail(run, "\n".join(lines))
            else:
                write_record(run, seconds)
                shutil.rmtree(Path(run.folder, FEATURES), ignore_errors=True)  # measured, and large
                self._done(run, f"done in {seconds:.0f} s; {len(self.waiting) + len(self.running)} are left")
            one.claim.close()

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
            one.note()
            one.claim.close()


def launch_words(run: Run, launcher: str, cpus: int) -> list[str]:
    """The command line that starts a run's tool in the run's number of processes."""
    python, processes = sys.executable, str(run.processes)
    if run.processes == 1:
        return [python, *run.command]
    if run.command[0] != TRAIN:
        torchrun = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        return [*torchrun, *run.command]
    if launcher == "dist":
        return ["bash", "tools/dist_train.sh", run.command[1], processes, *run.command[2:]]
    srun = ["srun", "--kill-on-bad-exit=1", f"--cpus-per-task={cpus}", python, "-u"]
    return [*srun, *run.command, "--launcher", "slurm"]


def end_with_runner() -> None:
    """Called in the tool's process before it starts: Linux then ends the tool when its runner is killed."""
    if PRCTL is not None:  # pragma: no cover, between fork and exec nothing is recorded
        PRCTL(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _tail(run: Run, count: int) -> list[str]:
    text = log.read_text(errors="replace") if (log := Path(run.folder, LOG)).is_file() else ""
    # A progress bar redraws its line after carriage returns; only its last state is shown.
    return [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.rstrip("\n").split("\n")][-count:]


def run_job(cpus: str, run: str) -> None:
    """Do one run, given as JSON, as a job of Slurm, which requeues a job at its time limit."""
    runner = LocalRunner([Run(**json.loads(run))], 1, "slurm", int(cpus))
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, runner.pass_on)
    try:
        runner.run()
    except StoppedError as error:
        print(error, flush=True)
        # SIGUSR1: the job has reached its time limit. Of jobs that end by SIGTERM, Slurm requeues those that
        # it preempted, but not those that were cancelled.
        if signal.SIGUSR1 in runner.told[:1] and (job := os.environ.get("SLURM_JOB_ID")):
            subprocess.run(["scontrol", "requeue", job], check=False)
        sys.exit(STOPPED)
