"""Read the scalars that MMEngine logs during training: losses, rates, metrics."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read_scalars(source: str | os.PathLike) -> list[Record]:
    """Read logged records from a work dir or a scalars file, one JSON record a line.

    A work dir has one file per start of the training, ordered by its first step, because the times in the
    folders' names go back with a clock or a time zone; steps that a resumed training repeated replace those
    of the interrupted one. A last line that a killed training cut short is left out.
    """
    source = Path(source)
    files = [source]
    if source.is_dir():
        files = [*source.glob("vis_data/scalars.json"), *sorted(source.glob("*/vis_data/scalars.json"))]
    if not files:
        raise FileNotFoundError(
            f"work dir `{source}` has no `<timestamp>/vis_data/scalars.json`: train first"
        )
    starts = [_read_file(file, may_be_cut=source.is_dir()) for file in files]
    starts.sort(key=lambda start: _first_steps(start)[True])  # those that begin alike stay in order of time
    records: list[Record] = []
    for start in starts:
        first = _first_steps(start)
        records = [record for record in records if record.get("step", 0) < first[_is_train(record)]]
        records += start
    return records


def _read_file(path: Path, may_be_cut: bool) -> list[Record]:
    lines = path.read_text().splitlines()
    if may_be_cut and lines and not lines[-1].endswith("}"):
        lines.pop()
    return [json.loads(line) for line in lines if line.strip()]


def _first_steps(records: list[Record]) -> dict[bool, float]:
    """First step of a start: of its training (True) and of its validation (False)."""
    first = {True: math.inf, False: math.inf}
    for record in records:
        kind = _is_train(record)
        first[kind] = min(first[kind], record.get("step", 0))
    return first


def last_values(source: str | os.PathLike) -> dict[str, float]:
    """The last value of every logged name, for example the final accuracy; see `read_scalars`."""
    items = [item for record in read_scalars(source) for item in record.items()]
    return {key: float(value) for key, value in items if isinstance(value, (int, float))}


def _is_train(record: Record) -> bool:
    # Training counts iterations and validation counts epochs, so their steps cannot be compared.
    return not record.keys().isdisjoint(("lr", "loss"))
