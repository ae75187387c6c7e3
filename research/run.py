"""Do one run of a table, given as JSON, and write its record: the Snakefile calls this.

Killed at any moment and called again, it continues: a training from its last checkpoint, a token store with
the images that it lacks.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from filelock import FileLock
from lab.paths import ROOT
from lab.plan import FEATURES, changed_config, current_identity
from lab.records import FILE, make_record, write_record
from lab.runs import TRAIN, Run, environment_of, launch_words, measurement_of

from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.errors import UserError, one_line_errors

NOTE_SECONDS = 30


def check(run: Run, nodes: int) -> None:
    """Raise UserError for a run that would be another one than was planned, or that cannot start here."""
    if current_identity(run) != run.id:
        raise UserError(f"{run.config} was changed after this run was planned: run the same command again")
    for folder in run.folders:
        if not os.path.isdir(folder):
            raise UserError(f"folder {folder} is missing: put the data of this table there")
    if nodes > 1 and "SLURM_JOB_ID" not in os.environ:
        raise UserError(f"{run.name} is meant for {run.processes} GPUs on {nodes} machines: --executor slurm")


def start(run: Run, nodes: int, threads: int) -> None:
    """Run the tool to its end, and note the seconds that all its starts have taken.

    Raises:
        UserError: it failed, or it did not write what it should.
    """
    words = launch_words(run, nodes)
    variables = {**os.environ, "PYTHON": sys.executable, **environment_of(run, threads)}
    if "PYTHONPATH" in os.environ:
        variables["PYTHONPATH"] = f"{variables['PYTHONPATH']}{os.pathsep}{os.environ['PYTHONPATH']}"
    began = time.monotonic() - seconds_of(run)
    process = subprocess.Popen(words, env=variables)
    while process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(NOTE_SECONDS)
        note_seconds(run, time.monotonic() - began)
    if process.returncode:
        raise UserError(f"{run.command[0]} ended with code {process.returncode}")
    for output in run.outputs:
        if not os.path.exists(output):
            raise UserError(f"{run.command[0]} did not write {output}")


def seconds_of(run: Run) -> float:
    """Seconds that all starts of a run have taken, as far as they were noted."""
    file = Path(run.folder, "seconds")
    return float(file.read_text()) if file.is_file() else 0.0


def note_seconds(run: Run, seconds: float) -> None:
    """Note what `seconds_of` returns."""
    replace_file(Path(run.folder, "seconds"), f"{seconds:.3f}\n".encode())


def teraflops_of(run: Run) -> float | None:
    """Teraflops of a pre-training's products, the same on any machine; None for another run."""
    if run.kind != "pre-training" or run.command[0] != TRAIN:
        return None
    sys.path.append(str(ROOT / "tools"))
    from flops import training_flops  # imports MMPretrain, which takes seconds

    return training_flops(changed_config(run.config, run.data, run.options), run.processes) / 1e12


@one_line_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Run.from_json, help="the run as JSON")
    parser.add_argument("--nodes", type=int, default=1, help="number of machines")
    parser.add_argument("--threads", type=int, default=1, help="threads of a process; results depend on it")
    args = parser.parse_args()
    run = args.run
    os.makedirs(run.folder, exist_ok=True)
    # If a killed Snakemake left this run at work, wait for it.
    with FileLock(f"{run.folder}/lock"):
        if Path(run.folder, FILE).is_file():
            return
        check(run, args.nodes)
        # Killed between the last checkpoint and its validation: resumed, the training would only end.
        is_trained = run.command[0] == TRAIN and os.path.exists(run.outputs[0])
        if is_trained and run.kind == "evaluation":
            start(measurement_of(run), 1, args.threads)
        else:
            start(run, args.nodes, args.threads)
        write_record(run, make_record(run, seconds_of(run), teraflops_of(run)))
        shutil.rmtree(Path(run.folder, FEATURES), ignore_errors=True)  # measured, and large


if __name__ == "__main__":
    main()
