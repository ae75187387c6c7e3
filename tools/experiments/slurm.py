"""Submit a plan as Slurm jobs with dependencies, or print the commands for several machines."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from experiments.declaration import Runner
from experiments.local import launch_words
from experiments.plan import Run
from experiments.records import StageError, claim, is_done

from mapet_mm.utils.atomic_files import replace_file

# Takes the sbatch command and the script for its standard input; returns the job's number.
Send = Callable[[Sequence[str], str], str]
DEPENDENCY = "--dependency=afterok:"


def sbatch_words(run: Run, runner: Runner, after: Sequence[str] = ()) -> list[str]:
    """The sbatch command of a run: its resources, its log, and the jobs that it waits for."""
    per_node = min(run.processes, runner.gpus_per_node or run.processes)
    words = ["sbatch", "--parsable", f"--job-name={run.name}", f"--output={run.folder}/job.log"]
    words += ["--open-mode=append", "--requeue", f"--nodes={math.ceil(run.processes / per_node)}"]
    words += ["--signal=B:USR1@120"]  # before the time limit: training saves and is requeued
    words += [f"--ntasks-per-node={per_node}", f"--cpus-per-task={runner.cpus_per_process}"]
    if runner.gpus_per_node and run.kind != "data":
        words += [f"--gres=gpu:{per_node}"]
    if after:
        words += [f"{DEPENDENCY}{':'.join(after)}", "--kill-on-invalid-dep=yes"]
    return [*words, *runner.sbatch]


def job_script(run: Run, runner: Runner) -> str:
    """The script of a job, which does the run as a local runner on the job's machine."""
    tool = str(Path(__file__).resolve().parents[1] / "run_table.py")
    words = [sys.executable, tool, "--job", str(runner.cpus_per_process), json.dumps(asdict(run))]
    return f"#!/bin/bash\nexec {shlex.join(words)}\n"


def submit(runs: Sequence[Run], runner: Runner, send: Send | None = None) -> int:
    """Submit the runs that are neither done nor submitted, each depending on its needs; returns how many.

    If `send` is given, it is called instead of sbatch, and nothing is written. Raises StageError if there is
    no Slurm here, or if it rejects a job.
    """
    if send is not None:
        return len(_submit(runs, runner, send, {}))
    if not runs:
        return 0
    # Two people who submit at the same time must not submit the same run.
    with claim(os.path.dirname(runs[0].folder), wait=True):
        return len(_submit(runs, runner, _sbatch, {run: job for run, (job, _) in live_jobs(runs).items()}))


def _submit(runs: Sequence[Run], runner: Runner, send: Send, jobs: dict[str, str]) -> set[str]:
    """Submit, and note each run's job in its folder; `jobs` are those already waiting or running."""
    new: set[str] = set()
    for run in runs:
        # If a need is submitted again, the run's old job depends on a failed one, and Slurm removes it.
        if is_done(run) or (run.folder in jobs and not new.intersection(run.needs)):
            continue
        after = [jobs[need] for need in run.needs if need in jobs]
        jobs[run.folder] = send(sbatch_words(run, runner, after), job_script(run, runner))
        new.add(run.folder)
        if send is _sbatch:
            replace_file(Path(run.folder, "job"), jobs[run.folder].encode())
    return new


def _sbatch(words: Sequence[str], script: str) -> str:
    # Slurm does not create the folder of a log.
    log = next(word for word in words if word.startswith("--output="))
    os.makedirs(os.path.dirname(log.removeprefix("--output=")), exist_ok=True)
    return _slurm(words, script).split(";")[0].strip()


def live_jobs(runs: Sequence[Run]) -> dict[str, tuple[str, str]]:
    """Number and state of the job of each run that has one waiting or running, by the run's folder."""
    files = [(run.folder, Path(run.folder, "job")) for run in runs if not is_done(run)]
    submitted = {folder: file.read_text() for folder, file in files if file.is_file()}
    if not submitted:
        return {}
    live = "--states=PENDING,CONFIGURING,RUNNING,SUSPENDED"
    states = dict(map(str.split, _slurm(["squeue", "--noheader", "--format=%A %T", live]).splitlines()))
    return {folder: (job, states[job]) for folder, job in submitted.items() if job in states}


def _slurm(words: Sequence[str], script: str | None = None) -> str:
    try:
        done = subprocess.run(words, input=script, capture_output=True, text=True)
    except FileNotFoundError:
        raise StageError(f"{words[0]} is not here: start this on a machine of the Slurm cluster") from None
    if done.returncode:
        raise StageError(f"`{shlex.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


def print_submission(runs: Sequence[Run], runner: Runner) -> None:
    """Print the submission of runs as a shell script, which keeps each job's number in a variable."""
    jobs: list[str] = []

    def send(words: Sequence[str], script: str) -> str:
        # Only the numbers of other jobs are the shell's to replace.
        quoted = [f'"{word}"' if word.startswith(DEPENDENCY) else shlex.quote(word) for word in words]
        jobs.append(f"job_{len(jobs) + 1}")
        print(f"{jobs[-1]}=$({' '.join(quoted)} <<'END'\n{script}END\n)")
        return f"${{{jobs[-1]}%%;*}}"  # in a federation, sbatch prints `number;cluster`

    submit(runs, runner, send)


def dist_lines(run: Run, runner: Runner) -> list[str]:
    """The command of a run without Slurm, for several machines if one has too few GPUs."""
    per_node = runner.gpus_per_node or run.processes
    here = replace(run, processes=min(run.processes, per_node))
    words = launch_words(here, "dist", runner.cpus_per_process)
    line = run.typed(["python" if word == sys.executable else word for word in words])
    if run.processes <= per_node:
        return [line]
    nodes = math.ceil(run.processes / per_node)
    return [
        f"# {run.processes} GPUs: on {nodes} machines, NODE_RANK 0 to {nodes - 1}, MASTER_ADDR the first",
        f"NNODES={nodes} NODE_RANK=$NODE_RANK MASTER_ADDR=$MASTER_ADDR {line}",
    ]
