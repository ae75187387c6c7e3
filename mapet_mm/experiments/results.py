"""The results of evaluations, kept in one file beside the tables."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from mapet_mm import __version__
from mapet_mm.experiments.plan import Cell, Run
from mapet_mm.file_replacement import replace_file
from mapet_mm.visualization.curves import last_value


class Measured(NamedTuple):
    """A cell over its seeds: mean, sample standard deviation (None for one seed) and the values."""

    mean: float
    spread: float | None
    values: tuple[float, ...]


class ResultsFile:
    """`results.json`: for each evaluation its metrics, options, seconds, version and date.

    A result counts while the key of its recipe is the plan's: with another config, option, tokenizer or
    version it has to be measured again. Work directories may be deleted once it is in here.

    Args:
        path: the file; need not exist.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self.results: dict[str, dict[str, Any]] = {}
        if self.path.is_file():
            self.results = json.loads(self.path.read_text())

    def add(self, run: Run, key: str, metrics: Iterable[str], seconds: float) -> None:
        """Read the last values of an evaluation's metrics from its log, and write the file.

        Raises:
            FileNotFoundError: the work directory has no log.
            KeyError: a metric was never logged.
        """
        self.results[run.name] = {
            "key": key,
            "config": run.config,
            "options": {name: str(value) for name, value in run.options.items()},
            "metrics": {metric: last_value(run.work_dir, metric) for metric in metrics},
            "seconds": round(seconds, 1),
            "version": __version__,
            "date": datetime.date.today().isoformat(),
        }
        self._write()

    def value(self, cell: Cell, keys: Mapping[str, str]) -> float | None:
        """A cell's value, None if it was not measured with the recipe of these keys."""
        result = self.results.get(cell.run)
        if result is None or result["key"] != keys[cell.run]:
            return None
        return result["metrics"].get(cell.metric)

    def seconds(self, runs: Iterable[str]) -> float:
        """Seconds that these evaluations took, as far as they are known."""
        return sum(self.results[name]["seconds"] for name in runs if name in self.results)

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, (json.dumps(self.results, indent=1, sort_keys=True) + "\n").encode())


def summarise(values: Iterable[float]) -> Measured | None:
    """Mean and spread of a cell's seeds; None if there is no value."""
    values = tuple(values)
    if not values:
        return None
    return Measured(mean(values), stdev(values) if len(values) > 1 else None, values)
