"""Submit a plan as Slurm jobs with dependencies."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from experiments.declaration import Runner
from experiments.plan import Run
from experiments.records import StageError, claim, is_done

from mapet_mm.utils.atomic_files import replace_file


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
        words += [f"--dependency=afterok:{':'.join(after)}", "--kill-on-invalid-dep=yes"]
    return [*words, *runner.sbatch]


def job_script(run: Run, runner: Runner) -> str:
    """The script of a job, which does the run as a local runner on the job's machine."""
    tool = str(Path(__file__).resolve().parents[1] / "run_table.py")
    words = [sys.executable, tool, "--job", str(runner.cpus_per_process), json.dumps(asdict(run))]
    return f"#!/bin/bash\nexec {shlex.join(words)}\n"


def submit(runs: Sequence[Run], runner: Runner) -> int:
    """Submit the runs that are neither done nor submitted, each depending on its needs; returns how many.

    Raises:
        StageError: there is no Slurm here, or it rejects a job.
    """
    if not runs:
        return 0
    new: set[str] = set()
    # Two people who submit at the same time must not submit the same run.
    with claim(os.path.dirname(runs[0].folder), wait=True):
        jobs = {folder: job for folder, (job, _) in live_jobs(runs).items()}
        for run in runs:
            # If a need is submitted again, the run's old job depends on a failed one, and Slurm removes it.
            if is_done(run) or (run.folder in jobs and not new.intersection(run.needs)):
                continue
            os.makedirs(run.folder, exist_ok=True)  # Slurm does not create the folder of a log
            after = [jobs[need] for need in run.needs if need in jobs]
            number = _slurm(sbatch_words(run, runner, after), job_script(run, runner))
            jobs[run.folder] = number.split(";")[0].strip()  # in a federation, it is `number;cluster`
            new.add(run.folder)
            replace_file(Path(run.folder, "job"), jobs[run.folder].encode())
    return len(new)


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
