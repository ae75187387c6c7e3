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

    A work dir has one file per start of the training; steps that a resumed training repeated replace those
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
    records: list[Record] = []
    for file in files:
        lines = file.read_text().splitlines()
        if source.is_dir() and lines and not lines[-1].endswith("}"):
            lines.pop()
        later = [json.loads(line) for line in lines if line.strip()]
        restart = {True: math.inf, False: math.inf}
        for record in later:
            restart[_is_train(record)] = min(restart[_is_train(record)], record.get("step", 0))
        records = [record for record in records if record.get("step", 0) < restart[_is_train(record)]] + later
    return records


def last_values(source: str | os.PathLike) -> dict[str, float]:
    """The last value of every logged name, for example the final accuracy; see `read_scalars`."""
    items = [item for record in read_scalars(source) for item in record.items()]
    return {key: float(value) for key, value in items if isinstance(value, (int, float))}


def _is_train(record: Record) -> bool:
    # Training counts iterations and validation counts epochs, so their steps cannot be compared.
    return not record.keys().isdisjoint(("lr", "loss", "effective_tokens/targets"))
