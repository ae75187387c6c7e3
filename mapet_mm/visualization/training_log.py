"""Read the scalars that MMEngine logs during training: losses, rates, metrics."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

Record = dict[str, Any]
# Prefix of the accuracies by place in the permuted order; they are logged by iteration.
PLACES = "place_accuracy/"


def find_scalars(work_dir: str | os.PathLike) -> list[Path]:
    """The scalar files of a work dir, oldest run first (a resumed training has several).

    Raises:
        FileNotFoundError: there is none.
    """
    work_dir = Path(work_dir)
    files = [work_dir / "vis_data/scalars.json", *sorted(work_dir.glob("*/vis_data/scalars.json"))]
    files = [file for file in files if file.is_file()]
    if not files:
        raise FileNotFoundError(
            f"work dir `{work_dir}` has no `<timestamp>/vis_data/scalars.json`: train with "
            "tools/train.py and `--work-dir` set to it first"
        )
    return files


def read_scalars(source: str | os.PathLike) -> list[Record]:
    """Read logged records from a work dir, a scalars file (JSON lines) or a CSV table.

    If a resumed run logged steps again, the later records count.

    Args:
        source: the work dir or file; CSV needs a header line, empty cells mean "not logged".

    Raises:
        FileNotFoundError: nothing was logged there.
        ValueError: a line is neither JSON nor CSV of numbers.
    """
    source = Path(source)
    if source.is_dir():
        records: list[Record] = []
        for file in find_scalars(source):
            records = _continue_with(records, _read_file(file, may_be_cut=True))
        return records
    if not source.is_file():
        raise FileNotFoundError(
            f"`{source}` does not exist: train with tools/train.py and `--work-dir` set to it first"
        )
    return _read_file(source)


def last_values(source: str | os.PathLike) -> dict[str, float]:
    """The last value of every logged name, for example the final accuracy.

    Raises:
        FileNotFoundError: nothing was logged there.
    """
    items = [item for record in read_scalars(source) for item in record.items()]
    return {key: float(value) for key, value in items if isinstance(value, (int, float))}


def _read_file(file: Path, may_be_cut: bool = False) -> list[Record]:
    """A file's records; if a killed training may have cut the last line short, that line is ignored."""
    try:
        lines = file.read_text().splitlines(keepends=True)
        if may_be_cut and lines and not lines[-1].rstrip(" ").endswith(("\n", "}")):
            lines.pop()
        if file.suffix == ".csv":
            return [{key: float(cell) for key, cell in row.items() if cell} for row in csv.DictReader(lines)]
        records = [json.loads(line) for line in lines if line.strip()]
        if not all(isinstance(record, dict) for record in records):
            raise ValueError("a line is no record")
        return records
    except (TypeError, ValueError, AttributeError, csv.Error) as error:
        raise ValueError(
            f"curve file `{file}` is damaged ({error}): it takes one JSON record a line, "
            "or CSV of numbers with a header"
        ) from None


def _continue_with(earlier: list[Record], later: list[Record]) -> list[Record]:
    """Append a resumed run's records; steps that it repeated replace those of the interrupted run."""
    restart = {is_train: _first_step(later, is_train) for is_train in (True, False)}
    kept = [record for record in earlier if record.get("step", 0) < restart[_is_train(record)]]
    return kept + later


def _first_step(records: list[Record], is_train: bool) -> float:
    steps = [record.get("step", 0) for record in records if _is_train(record) == is_train]
    return min(steps, default=float("inf"))


def _is_train(record: Record) -> bool:
    # Training counts iterations and validation counts epochs, so their steps cannot be compared.
    return "lr" in record or "loss" in record or bool(places_of(record))


def places_of(record: Record) -> dict[int, float]:
    """Accuracies by their number in the permuted order, from 1 on; some may be missing."""
    names = sorted(name for name in record if name.startswith(PLACES))
    return {int(name.removeprefix(PLACES)): record[name] for name in names}
