"""A table of the paper as a config file: rows, columns, and the config that each cell runs.

    rows = [dict(name="MIM", pretrain="configs/mim/mim_vit-{size}-p16_{batch}-..._in1k.py"), ...]
    columns = [dict(name="ViT-T, fine-tuning", unit="top-1, %", size="tiny", batch="16xb128",
                    config="configs/mapet/benchmarks/...", metric="accuracy/top1", paper={"MIM": 74.9})]

A name in braces is replaced by the entry of that name in the row or the column.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mapet_mm.utils.config import read_config
from mapet_mm.utils.errors import UserError

TABLES = Path("configs/tables")
LAUNCHERS = ("local", "dist", "slurm")


class DeclarationError(UserError):
    """A table does not exist, or its declaration is wrong; the message is one line."""


@dataclass(frozen=True)
class Row:
    """One row: what is evaluated."""

    name: str  # as the paper writes it
    pretrain: str | None = None  # config of the pre-training, None for none
    tokenizer: str | None = None  # tokenizer config whose tokens are read, None for none
    options: Mapping[str, Any] = field(default_factory=dict)  # changes to `pretrain`, as in --cfg-options
    start: str | None = None  # the row above whose pre-training this one continues, None for none
    curve: str | None = None  # in a picture over compute, the curve with this row's point, None for its own
    columns: Sequence[str] | None = None  # names of the columns in which it is evaluated, None for all
    data: str | None = None  # dataset of the pre-training, with {seed} for each seed's own; None: the table's
    values: Mapping[str, str] = field(default_factory=dict)  # values for braces; they override the column's


@dataclass(frozen=True)
class Column:
    """One column: how it is evaluated."""

    name: str  # as the paper writes it
    unit: str  # what is measured and its unit
    config: str | None  # of the evaluation; None leaves the column out (no such data)
    metric: str  # name in MMEngine's log; the last value counts
    options: Mapping[str, Any] = field(default_factory=dict)  # changes to `config`, as in --cfg-options
    data: str | None = None  # the dataset to evaluate on, None for the table's
    source: Mapping[str, Sequence[str]] = field(default_factory=dict)  # what makes it, as the table's `data`
    paper: Mapping[str, float] = field(default_factory=dict)  # the paper's numbers, by the row's name
    values: Mapping[str, str] = field(default_factory=dict)  # values for the braces in configs

    @property
    def heading(self) -> str:
        """Name and unit, unique among the columns."""
        return f"{self.name} ({self.unit})"

    @property
    def is_cost(self) -> bool:
        """True for the cost of a row, false for its quality."""
        return self.metric.startswith(("tokenizer/", "pre-training/"))


@dataclass(frozen=True)
class Runner:
    """The launcher of a table's runs, and the resources of each."""

    # 'local': here, in parallel, one process each; 'dist': one after another, on this machine's GPUs;
    # 'slurm': one job each.
    launcher: str = "local"
    gpus_per_node: int = 0  # of the machines to use; 0 for runs on the CPU
    cpus_per_process: int = 1  # threads of a process, and CPUs that a job asks for
    sbatch: Sequence[str] = ()  # more arguments of sbatch, such as `--time=3-0`


@dataclass(frozen=True)
class TableDeclaration:
    """A table, declared for a dataset."""

    name: str
    dataset: str  # its configs are read for this one
    title: str
    rows: Sequence[Row]
    columns: Sequence[Column]
    baseline: str | None = None  # the row that all others are compared with, seed by seed; None for none
    notes: Sequence[str] = ()  # what readers need to know, one line each
    # The command that makes the data, dict(command=[...], outputs=[...]), or the folders that must exist,
    # dict(folders=[...]).
    data: Mapping[str, Sequence[str]] = field(default_factory=dict)
    runner: Runner = field(default_factory=Runner)


def list_datasets(root: str | os.PathLike = TABLES) -> list[str]:
    """Names of the datasets that tables are declared for, from the files' names."""
    return sorted(path.stem for path in Path(root).glob("*.py"))


def list_tables(dataset: str, root: str | os.PathLike = TABLES) -> dict[str, Path]:
    """File of each of a dataset's tables, by name, from the folders that the dataset's file lists."""
    require_names([dataset], list_datasets(root), f"{root}: dataset")
    folders = read_config(Path(root) / f"{dataset}.py", dataset).get("tables", [dataset])
    # If two folders have a table of one name, the folder that is listed first counts.
    files = [path for folder in reversed(folders) for path in (Path(root) / folder).glob("*.py")]
    return {path.stem: path for path in sorted(files, key=lambda path: path.stem)}


def load_table(name: str, dataset: str, root: str | os.PathLike = TABLES) -> TableDeclaration:
    """Read a table's declaration; a column whose config is None is left out.

    Raises:
        DeclarationError: there is no such table, an entry is missing or unknown, or names repeat.
    """
    files = list_tables(dataset, root)
    require_names([name], files, f"{dataset}: table")
    where = f"table `{files[name]}`"
    cfg = read_config(files[name], dataset).to_dict()
    require_names(["rows", "columns", "title"], cfg, f"{where}: entry")
    rows = [_build(Row, {"tokenizer": cfg.get("tokenizer"), **row}, where) for row in cfg["rows"]]
    columns = [_build(Column, column, where) for column in cfg["columns"]]
    _check_names(rows, columns, cfg.get("baseline"), where)
    runner = _build(Runner, cfg.get("runner", {}), where)
    require_names([runner.launcher], LAUNCHERS, f"{where}: launcher")
    others = {key: cfg[key] for key in ("baseline", "notes", "data") if key in cfg}
    columns = [column for column in columns if column.config is not None]
    return TableDeclaration(name, dataset, cfg["title"], rows, columns, runner=runner, **others)


def _build(kind: type, entries: Mapping[str, Any], where: str) -> Any:
    """Build a row, column or runner; unknown strings of a row or column become values for the braces."""
    fields = kind.__dataclass_fields__
    if "values" in fields:
        values = {key: one for key, one in entries.items() if key not in fields and isinstance(one, str)}
        entries = {key: one for key, one in entries.items() if key not in values} | {"values": values}
    try:
        return kind(**entries)
    except TypeError as error:  # names the entry that is missing or unknown
        raise DeclarationError(f"{where}, {kind.__name__.lower()} {entries}: {error}") from error


def _check_names(rows: Sequence[Row], columns: Sequence[Column], baseline: str | None, where: str) -> None:
    row_names, column_names = [row.name for row in rows], [column.name for column in columns]
    for noun, names in (("row", row_names), ("column", [column.heading for column in columns])):
        if repeated := [name for name in names if names.count(name) > 1]:
            raise DeclarationError(f"{where} has two {noun}s named {repeated[0]!r}")
    for place, row in enumerate(rows):
        require_names(row.columns or (), column_names, f"{where}, {row.name!r}: column")
        above = [other.name for other in rows[:place] if other.pretrain and row.pretrain]
        require_names([row.start] if row.start else (), above, f"{where}, {row.name!r}: start")
    require_names([baseline] if baseline else (), row_names, f"{where}: baseline")
    for column in columns:
        require_names(column.paper, row_names, f"{where}: row of the paper in {column.name!r}")


def require_names(names: Iterable[str], known: Iterable[str], noun: str) -> None:
    """Raise DeclarationError unless all of the names are known."""
    known = list(known)
    if unknown := [name for name in names if name not in known]:
        raise DeclarationError(f"{noun} {unknown[0]!r} does not exist; there are: {', '.join(known)}")
