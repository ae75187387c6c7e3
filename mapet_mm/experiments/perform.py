"""Do one run, wherever it is started: claim it, check what it is, start its tool, keep its result.

    python -m mapet_mm.experiments.perform LAUNCHER CPUS '{"command": ["tools/train.py", ...], ...}'

This is what `tools/run_table.py` starts, here or as a job. A run is done once its record is there: one file
in `results/`, beside the folder of runs, written once. A run that was killed goes on where its tool resumes.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mapet_mm import __version__
from mapet_mm.errors import STOPPED, UserError
from mapet_mm.experiments.plan import TRAIN, Run, identity, read_config
from mapet_mm.file_replacement import replace_file
from mapet_mm.scalars import last_values


class StageError(UserError, RuntimeError):
    """A run that failed or cannot be done; the message says what to do."""


class StoppedError(StageError):
    """A run that was told to end by a signal, and goes on where it stands when it is started again."""

    def __init__(self, message: str, number: int | None) -> None:
        super().__init__(message)
        self.number = number


def record_of(run: Run) -> dict[str, Any] | None:
    """What is kept of a run that was done: metrics, seconds, command, version, date; None if it was not."""
    file = _record_file(run)
    return json.loads(file.read_text()) if file.is_file() else None


def is_done(run: Run) -> bool:
    """Whether the run was completed and what it made is there as it was; evaluations are only measured.

    A codebook or store that was replaced since is looked at again, by the tool that makes it.
    """
    record = record_of(run)
    return record is not None and (run.kind == "evaluation" or record["made"] == _made(run))


def _made(run: Run) -> dict[str, int]:
    """The outputs that are there; what is not in the run's own folder, and may be replaced, with its date."""
    there = [output for output in run.outputs if os.path.exists(output)]
    return {path: 0 if path.startswith(run.folder) else os.stat(path).st_mtime_ns for path in there}


def is_claimed(run: Run) -> bool:
    """Whether some process, on whatever machine, is doing the run now."""
    with contextlib.suppress(FileNotFoundError, PermissionError), open(f"{run.folder}/claim", "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextlib.contextmanager
def claim(folder: str) -> Iterator[int]:
    """Hold a folder as the only one; waits for who has it, and ends with the process, however that ends."""
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/claim", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise StageError(
                f"cannot lock {file.name} ({error.strerror}): take an --out with locks"
            ) from error
        yield file.fileno()


def launch_words(run: Run, launcher: str, cpus: int) -> list[str]:
    """The command line that starts a run's tool in as many processes as it is meant for."""
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


def perform_words(run: Run, launcher: str, cpus: int) -> list[str]:
    """The command line of this module for a run."""
    return [
        sys.executable,
        "-m",
        "mapet_mm.experiments.perform",
        launcher,
        str(cpus),
        json.dumps(asdict(run)),
    ]


def perform(run: Run, launcher: str, cpus: int) -> None:
    """Do a run, unless it is done; waits while another process does it.

    Raises:
        StageError: its config is not that of the plan any more, its tool failed or did not write its outputs,
            or an artefact of another recipe is in its place.
    """
    with claim(run.folder) as held:
        if is_done(run):
            return
        failed = Path(run.folder, "failed")
        failed.unlink(missing_ok=True)
        try:
            _check_identity(run)
            started = time.monotonic()
            if not _adopted(run):
                _start_tool(run, launch_words(run, launcher, cpus), cpus, held)
            _write_record(run, time.monotonic() - started)
        except StoppedError:
            raise
        except Exception as error:
            replace_file(failed, f"{error}\n".encode())
            raise


def _start_tool(run: Run, words: Sequence[str], cpus: int, held: int) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": str(cpus), "PYTHON": sys.executable}
    # The tool keeps the claim, should this process be killed and not the tool.
    with subprocess.Popen(words, env=environment, pass_fds=[held]) as tool, _passing_on(tool) as told:
        code = tool.wait()
    if code and (told or code == STOPPED):
        number = told[0] if told else None
        raise StoppedError(f"{run.command[0]} was told to end: the same command goes on", number)
    if code:
        raise StageError(f"{run.command[0]} ended with code {code}")
    if missing := [output for output in run.outputs if not os.path.exists(output)]:
        raise StageError(f"{run.command[0]} did not write {', '.join(missing)}")


@contextlib.contextmanager
def _passing_on(tool: subprocess.Popen) -> Iterator[list[int]]:
    """Pass the signals by which Slurm tells a job to end on to the tool; gives those that came."""
    told: list[int] = []

    def pass_on(number: int, _: object) -> None:
        told.append(number)
        tool.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGUSR1, signal.SIGTERM)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _requeue(error: StoppedError) -> None:
    """Put the job that this is back into Slurm's queue, if its time was over.

    Of jobs that end by SIGTERM, Slurm puts back those that it took the machine from, and not those that were
    cancelled.
    """
    if error.number == signal.SIGUSR1 and (job := os.environ.get("SLURM_JOB_ID")):
        subprocess.run(["scontrol", "requeue", job], check=False)


def _write_record(run: Run, seconds: float) -> None:
    record = {
        "run": run.name,
        "command": run.command,
        "needs": run.needs,
        "metrics": last_values(run.folder) if run.kind == "evaluation" else {},
        "made": _made(run),
        "seconds": round(seconds, 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "version": __version__,
        "date": datetime.date.today().isoformat(),
    }
    file = _record_file(run)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, (json.dumps(record, indent=1) + "\n").encode())


def _record_file(run: Run) -> Path:
    return Path(run.folder).parents[1] / "results" / f"{os.path.basename(run.folder)}.json"


def _check_identity(run: Run) -> None:
    """A config that was edited after the plan was made must not be recorded as the plan's."""
    if not run.folder.endswith(identity(run.command, run.needs, run.folder)):
        raise StageError(f"{run.config} was changed after this run was planned: run the same command again")


def _adopted(run: Run) -> bool:
    """Whether a codebook of this recipe is there already, made by hand or for another table.

    Stores are adopted by their tool, which goes on with what is there and refuses that of another tokenizer.
    """
    if run.command[0] != "tools/fit_codebook.py" or not os.path.exists(run.outputs[0]):
        return False
    from safetensors import safe_open

    cfg = read_config(run.config).to_dict()
    settings = dict(cfg["codebook"])
    dataset = settings.pop("dataset", cfg["dataset"])
    pipeline = (dataset if isinstance(dataset, dict) else dataset[0])["pipeline"]
    settings["preprocessing"] = {"pipeline": pipeline, "data_preprocessor": cfg["data_preprocessor"]}
    with safe_open(run.outputs[0], framework="np") as file:
        recorded = {key: json.loads(text) for key, text in (file.metadata() or {}).items() if key in settings}
    settings = json.loads(json.dumps(settings))
    if other := [key for key, value in settings.items() if recorded.get(key) != value]:
        raise StageError(
            f"codebook {run.outputs[0]} was made with another `{other[0]}` than {run.config} has: give the "
            "config another `tokenizer.codebook`, or remove the file"
        )
    print(f"{run.outputs[0]} was made with this recipe: it is kept")
    return True


def _end_with_parent() -> None:
    """End, and the tool with it, when the runner is killed: nobody would see or stop it."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    launcher, cpus, run = sys.argv[1:]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        perform(Run(**json.loads(run)), launcher, int(cpus))
    except StoppedError as error:
        print(error, flush=True)
        _requeue(error)
        sys.exit(STOPPED)
    except (StageError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
