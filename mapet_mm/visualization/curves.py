"""Loss and accuracy curves from the scalars that MMEngine writes while it trains."""

from __future__ import annotations

import csv
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Record = dict[str, Any]

TRAIN_COLOUR, VAL_COLOUR, REFERENCE_COLOUR = "#2f6fb0", "#d9722a", "#b8b8c0"


@dataclass(frozen=True)
class Curve:
    """One logged value over training: `values[i]` at `steps[i]`, where steps count `unit`s."""

    steps: list[float]
    values: list[float]
    unit: str


@dataclass(frozen=True)
class Panel:
    """What one picture of curves shows: the axis label with its unit and the logged keys."""

    title: str
    label: str
    train_key: str
    val_key: str


PRETRAINING_PANELS = (
    Panel("Pre-training loss", "cross-entropy per target (nats)", "loss", "token/loss"),
    Panel("Token accuracy", "targets predicted right (%)", "token_accuracy", "token/accuracy"),
)


def find_scalars(work_dir: str | os.PathLike) -> list[Path]:
    """The scalar files of a work directory, oldest run first (a resumed training has several).

    Raises:
        FileNotFoundError: there is none.
    """
    work_dir = Path(work_dir)
    files = [work_dir / "vis_data/scalars.json", *sorted(work_dir.glob("*/vis_data/scalars.json"))]
    files = [file for file in files if file.is_file()]
    if not files:
        raise FileNotFoundError(
            f"work directory `{work_dir}` has no `<timestamp>/vis_data/scalars.json`: train with "
            "tools/train.py and `--work-dir` set to it first"
        )
    return files


def read_scalars(source: str | os.PathLike) -> list[Record]:
    """Read logged records from a work directory, a scalars file (JSON lines) or a CSV table.

    Where a resumed run wrote steps again, the later ones stand.

    Args:
        source: the work directory or file; CSV needs a header line, empty cells mean "not logged".

    Raises:
        FileNotFoundError: nothing was logged there.
        ValueError: a line is neither JSON nor CSV of numbers.
    """
    source = Path(source)
    if source.is_dir():
        records: list[Record] = []
        for file in find_scalars(source):
            records = _continue_with(records, _read_file(file))
        return records
    if not source.is_file():
        raise FileNotFoundError(
            f"`{source}` does not exist: train with tools/train.py and `--work-dir` set to it first"
        )
    return _read_file(source)


def curve(records: Sequence[Record], key: str) -> Curve:
    """One value over training: by epoch (mean over what the epoch logged) or, without epochs, by iteration.

    Args:
        records: what `read_scalars` returns.
        key: the logged name, such as 'loss' or 'accuracy/top1'.
    """
    by_epoch = any("epoch" in record for record in records)
    logged: dict[float, list[float]] = defaultdict(list)
    for record in records:
        if key in record:
            logged[record.get("epoch", record.get("step"))].append(record[key])
    steps = sorted(logged)
    means = [sum(logged[step]) / len(logged[step]) for step in steps]
    return Curve(steps, means, "epoch" if by_epoch else "iteration")


def last_value(source: str | os.PathLike, key: str) -> float:
    """The last logged value of a key in a work directory or file, for example the final accuracy.

    Raises:
        FileNotFoundError: nothing was logged there.
        KeyError: the key was never logged; the message lists those that were.
    """
    records = read_scalars(source)
    values = [record[key] for record in records if key in record]
    if not values:
        logged = ", ".join(sorted({name for record in records for name in record}))
        raise KeyError(f"`{source}` has no logged value `{key}`; it has {logged}")
    return float(values[-1])


def curve_figure(
    panel: Panel, records: Sequence[Record], reference: Sequence[Record] | None = None
) -> Figure:
    """Draw one panel: training and validation, and a reference run behind them.

    Args:
        panel: what to draw.
        records: the run's records.
        reference: records of a committed run to compare with.
    """
    figure = Figure(figsize=(4.4, 3.0), layout="constrained")
    axes = figure.subplots()
    if reference is not None:
        _plot(axes, curve(reference, panel.train_key), "reference, training", REFERENCE_COLOUR, "-", 4)
        _plot(axes, curve(reference, panel.val_key), "reference, validation", REFERENCE_COLOUR, ":", 4)
    training = curve(records, panel.train_key)
    _plot(axes, training, "training", TRAIN_COLOUR, "-", 1.6)
    _plot(axes, curve(records, panel.val_key), "validation", VAL_COLOUR, "--", 1.6)
    axes.set_title(panel.title, fontsize=11, fontweight="bold")
    axes.set_xlabel(f"{training.unit}s", fontsize=9)
    axes.set_ylabel(panel.label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="#e8e8ec")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    return figure


def _plot(axes: Axes, drawn: Curve, label: str, colour: str, style: str, width: float) -> None:
    if drawn.steps:
        marker = "o" if len(drawn.steps) == 1 else None
        axes.plot(drawn.steps, drawn.values, style, color=colour, linewidth=width, label=label, marker=marker)


def _read_file(file: Path) -> list[Record]:
    lines = file.read_text().splitlines()
    try:
        if file.suffix == ".csv":
            return [{key: float(cell) for key, cell in row.items() if cell} for row in csv.DictReader(lines)]
        return [json.loads(line) for line in lines if line.strip()]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"curve file `{file}` is damaged ({error}): it takes one JSON record a line, "
            "or CSV of numbers with a header"
        ) from None


def _continue_with(earlier: list[Record], later: list[Record]) -> list[Record]:
    """Append a resumed run's records; what it did again replaces what the interrupted run had logged."""
    restart = {is_train: _first_step(later, is_train) for is_train in (True, False)}
    kept = [record for record in earlier if record.get("step", 0) < restart[_is_train(record)]]
    return kept + later


def _first_step(records: list[Record], is_train: bool) -> float:
    steps = [record.get("step", 0) for record in records if _is_train(record) == is_train]
    return min(steps, default=float("inf"))


def _is_train(record: Record) -> bool:
    # Training counts iterations and validation counts epochs, so their steps cannot be compared.
    return "lr" in record or "loss" in record
