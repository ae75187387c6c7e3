"""Records: one JSON object for each finished run, with what it was and its figures.

`research/records.jsonl` has those that are kept, one a line; a run's folder has its own until it is kept.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lab.paths import RECORDS, RUNS
from lab.plan import RESULTS
from lab.runs import TESTED, Run
from mapet_mm import __version__
from mapet_mm.utils.atomic_files import replace_file, replace_json
from mapet_mm.visualization.training_log import last_values

Record = dict[str, Any]
FILE = "record.json"
# Fields of a run that its record repeats: what it was.
SAID = ("id", "name", "kind", "config", "data", "options", "seed", "evaluation")
# Entries of a training's log that describe the last step instead of the result.
OF_THE_STEP = {"base_lr", "lr", "data_time", "time", "memory", "epoch", "iter", "step", "grad_norm"}


def read_kept(file: Path = RECORDS) -> dict[str, Record]:
    """The kept records by identity."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return {record["id"]: record for record in records}


def read_finished(runs: Path = RUNS) -> dict[str, Record]:
    """The records in the folders of runs, by identity."""
    records = [json.loads(file.read_text()) for file in sorted(runs.glob(f"*/{FILE}"))]
    return {record["id"]: record for record in records}


def read_all() -> dict[str, Record]:
    """Kept records, and those of runs that finished here, which count where both have one."""
    return read_kept() | read_finished()


def write_kept(records: Iterable[Record], file: Path = RECORDS) -> None:
    """Write records one a line, in the order of their names."""
    ordered = sorted(records, key=lambda record: (record["name"], record["data"] or "", record["id"]))
    replace_file(file, "".join(json.dumps(record) + "\n" for record in ordered).encode())


def make_record(run: Run, seconds: float, teraflops: float | None = None) -> Record:
    """The record of a run that has just finished."""
    record = {name: getattr(run, name) for name in SAID}
    record["needs"] = [need.rpartition("-")[2] for need in run.needs]
    record["metrics"] = metrics_of(run) if run.kind == "evaluation" else {}
    record["seconds"] = round(seconds, 1)
    record["machine"] = machine()
    record["version"] = __version__
    record["date"] = datetime.date.today().isoformat()
    if teraflops is not None:
        record["teraflops"] = teraflops
    precision = precision_of(run.folder)
    if precision is not None:
        record["precision"] = precision
    return record


def precision_of(work_dir: str | os.PathLike) -> str | None:
    """What a training's logs say that it computed in, "bfloat16" say; None without autocast."""
    logs = Path(work_dir).glob("*/*.log")
    said = {dtype for log in logs for dtype in re.findall(r"autocast: torch\.(\w+)", log.read_text())}
    return " and ".join(sorted(said)) or None


def machine() -> str:
    """What computes here: a GPU's name, or a CPU's instructions."""
    import torch  # takes seconds, which showing a table need not wait

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores"


def write_record(run: Run, record: Record) -> None:
    """Write the record that marks a run as done."""
    replace_json(Path(run.folder, FILE), record)


def metrics_of(run: Run) -> Mapping[str, float]:
    """The last values of a training's log, or an evaluation's, by protocol: `k-NN, class token`."""
    tested = Path(run.folder, TESTED)
    if tested.is_file():
        return json.loads(tested.read_text())
    file = Path(run.folder, RESULTS)
    if not file.is_file():
        values = last_values(run.folder)
        return {name: value for name, value in values.items() if name not in OF_THE_STEP}
    (rows,) = json.loads(file.read_text()).values()
    return {
        f"{row['protocol']}, {row['setting']}" if row["setting"] else row["protocol"]: row["value"]
        for row in rows
    }
