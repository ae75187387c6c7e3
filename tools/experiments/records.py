"""State of a run: whether a process is doing it, whether it is done, and its figures.

A run is done once its record exists: one file in `results/`, beside the folder of runs, written once.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import platform
from pathlib import Path
from typing import Any, TextIO

from experiments.plan import RESULTS, Run, identity

from mapet_mm import __version__
from mapet_mm.utils.atomic_files import replace_file, replace_json
from mapet_mm.utils.config import read_config
from mapet_mm.utils.errors import UserError
from mapet_mm.visualization.training_log import last_values

FIELDS = {"metrics", "made", "seconds", "machine"}


class StageError(UserError):
    """A run failed or cannot be done; the message says what to do."""


def record_of(run: Run) -> dict[str, Any] | None:
    """The record of a completed run; None if it is missing or not whole."""
    try:
        record = json.loads(_record_file(run).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return record if isinstance(record, dict) and record.keys() >= FIELDS else None


def is_done(run: Run) -> bool:
    """True if the run was completed and its outputs are unchanged; for evaluations only the record counts.

    If a codebook or store was replaced since, its tool runs again and checks it.
    """
    record = record_of(run)
    return record is not None and (run.kind == "evaluation" or record["made"] == _made(run))


def write_record(run: Run, seconds: float) -> None:
    """Write the record of a run, which marks it as done, with the seconds of all its starts."""
    record = {
        "run": run.name,
        "command": run.command,
        "data": run.data,
        "needs": run.needs,
        "metrics": _metrics(run) if run.kind == "evaluation" else {},
        "made": _made(run),
        "seconds": round(seconds, 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "version": __version__,
        "date": datetime.date.today().isoformat(),
    }
    file = _record_file(run)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_json(file, record)


def note_teraflops(run: Run, teraflops: float) -> None:
    """Add a training's arithmetic to its record, for machines without its images."""
    replace_json(_record_file(run), {**record_of(run), "teraflops": teraflops})


def _metrics(run: Run) -> dict[str, float]:
    """The last values of a training's log, or an evaluation's, by protocol: `k-NN, class token`."""
    file = Path(run.folder, RESULTS)
    if not file.is_file():
        return last_values(run.folder)
    (rows,) = json.loads(file.read_text()).values()
    return {f"{row['protocol']}, {row['setting']}": row["value"] for row in rows}


def _record_file(run: Run) -> Path:
    return Path(run.folder).parents[1] / "results" / f"{os.path.basename(run.folder)}.json"


def _made(run: Run) -> dict[str, int]:
    """The outputs that exist: inside the run's folder, which may be moved, their names; else their dates."""
    made = {}
    for path in filter(Path.exists, map(Path, run.outputs)):
        if path.is_relative_to(run.folder):
            made[str(path.relative_to(run.folder))] = 0
        else:
            made[str(path)] = path.stat().st_mtime_ns
    return made


def seconds_of(run: Run) -> float:
    """Seconds that all starts of a run have taken, as far as they were noted."""
    file = Path(run.folder, "seconds")
    return float(file.read_text()) if file.is_file() else 0.0


def note_seconds(run: Run, seconds: float) -> None:
    """Note what `seconds_of` returns."""
    replace_file(Path(run.folder, "seconds"), f"{seconds:.3f}\n".encode())


def claim(folder: str, wait: bool = False) -> TextIO | None:
    """Open a file that claims a folder for this process and its children until they end in whatever way.

    Returns None if another process on any machine has claimed it; with `wait`, waits for that process.
    """
    os.makedirs(folder, exist_ok=True)
    file = open(f"{folder}/claim", "a")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        return None
    return file


def check_identity(run: Run) -> None:
    """Raise StageError if the config was edited since the plan: the result would be another recipe's."""
    config = read_config(run.config, run.data) if run.config else None
    if not run.folder.endswith(identity(run.command, run.needs, run.folder, config)):
        raise StageError(f"{run.config} was changed after this run was planned: run the same command again")
