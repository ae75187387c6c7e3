"""A table of the paper as a config file: rows, columns, and the config that each cell runs.

    rows = [dict(name="MIM", pretrain="configs/mim/mim_vit-{size}-p16_{batch}-..._in1k.py"), ...]
    columns = [dict(name="ViT-T, fine-tuning", unit="top-1, %", size="tiny", batch="16xb128",
                    config="configs/mapet/benchmarks/...", metric="accuracy/top1", paper={"MIM": 74.9})]

A name in braces is replaced by the entry of that name in the row or the column.
"""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mapet_mm.utils.config import read_config
from mapet_mm.utils.errors import UserError

TABLES = Path("configs/tables")
LAUNCHERS = ("local", "dist", "slurm")


class DeclarationError(UserError, ValueError):
    """A table does not exist or its declaration is wrong; the message is one line."""


@dataclass(frozen=True)
class Row:
    """One row: what is evaluated."""

    name: str  # as the paper writes it
    pretrain: str | None = None  # config of the pre-training, None for none
    tokenizer: str | None = None  # tokenizer config whose tokens are read, None for none
    options: Mapping[str, Any] = field(default_factory=dict)  # changes to `pretrain`, as in --cfg-options
    start: str | None = None  # the row above whose pre-training this one goes on from, None for none
    evaluation_options: Mapping[str, Any] = field(default_factory=dict)  # changes to the columns' configs
    curve: str | None = None  # in a picture over compute, the curve with this row's point, None for its own
    columns: Sequence[str] | None = None  # names of the columns in which it is evaluated, None for all
    data: str | None = None  # dataset of the pre-training, None for the table's
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
        """Whether it says what a row costs, not how good it is."""
        return self.metric.startswith(("tokenizer/", "pre-training/"))

    @property
    def has_best(self) -> bool:
        """Whether more is better: not of costs, nor of how many tokens are used and how many are dead."""
        return not self.is_cost and self.metric not in ("tokens/perplexity", "tokens/dead")


@dataclass(frozen=True)
class Runner:
    """How a table's runs are started: 'local' (here, in parallel, one process each), 'dist' (one after
    another, on this machine's GPUs) or 'slurm' (one job each); and the resources of each run."""

    launcher: str = "local"
    gpus_per_node: int = 0  # of the machines to use; 0 for runs on the CPU
    cpus_per_process: int = 1  # threads of a process, and CPUs that a job asks for
    sbatch: Sequence[str] = ()  # more arguments of sbatch, such as `--time=3-0`

    def __post_init__(self) -> None:
        if self.launcher not in LAUNCHERS:
            raise DeclarationError(f"launcher {self.launcher!r} is none of {', '.join(LAUNCHERS)}")


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
    gpu_hours: Mapping[str, float] = field(default_factory=dict)  # the paper's, by the stem of a config

    def require(self, rows: Sequence[str], columns: Sequence[str]) -> None:
        """Raise DeclarationError unless all of these names are rows and columns of the table."""
        where = f"table `{self.name}`: --{{}}s names"
        require_names(rows, "row", [row.name for row in self.rows], where.format("row"))
        require_names(columns, "column", [column.name for column in self.columns], where.format("column"))

    def only(self, rows: Sequence[str], columns: Sequence[str]) -> TableDeclaration:
        """The table with the rows and columns of these names; with all rows, or columns, if it has none."""
        return replace(
            self,
            rows=[row for row in self.rows if row.name in rows] or self.rows,
            columns=[column for column in self.columns if column.name in columns] or self.columns,
        )

    def require_folders(self) -> None:
        """Raise DeclarationError if data folders that no command makes are missing."""
        if missing := [folder for folder in self.data.get("folders", ()) if not os.path.isdir(folder)]:
            raise DeclarationError(
                f"folder {missing[0]} is not there: this table needs it; put the data there"
            )


def list_datasets(root: str | os.PathLike = TABLES) -> list[str]:
    """Names of the datasets that tables are declared for, from the files' names."""
    return sorted(path.stem for path in Path(root).glob("*.py"))


def list_tables(dataset: str, root: str | os.PathLike = TABLES) -> list[str]:
    """Names of a dataset's tables: those in the folders that its file lists in `tables`."""
    return sorted(_table_files(dataset, root))


def _table_files(dataset: str, root: str | os.PathLike) -> dict[str, Path]:
    if dataset not in (datasets := list_datasets(root)):
        raise DeclarationError(f"there is no {dataset}.py in {root}; there are: {', '.join(datasets)}")
    folders = read_config(Path(root) / f"{dataset}.py", dataset).get("tables", [dataset])
    # If two folders have a table of one name, the folder that is listed first counts.
    files = [path for folder in reversed(folders) for path in (Path(root) / folder).glob("*.py")]
    return {path.stem: path for path in files}


def load_table(name: str, dataset: str, root: str | os.PathLike = TABLES) -> TableDeclaration:
    """Read a table's declaration; a column whose config is None is left out.

    Raises:
        DeclarationError: there is no such table, an entry is missing or unknown, or names repeat.
    """
    files = _table_files(dataset, root)
    if name not in files:
        known = ", ".join(sorted(files)) or "none"
        raise DeclarationError(f"there is no table `{name}` for {dataset}; there are: {known}")
    path = files[name]
    cfg = read_config(path, dataset).to_dict()
    if missing := [key for key in ("rows", "columns", "title") if key not in cfg]:
        raise DeclarationError(f"table `{path}` has no `{missing[0]}`")
    rows = [_build(Row, {"tokenizer": cfg.get("tokenizer"), **row}, path) for row in cfg["rows"]]
    columns = [_build(Column, column, path) for column in cfg["columns"]]
    _check_names(rows, columns, path)
    columns = [column for column in columns if column.config is not None]
    if not columns:
        raise DeclarationError(f"table `{path}` has no column that {dataset} has the data for")
    others = {key: cfg[key] for key in ("baseline", "notes", "data", "gpu_hours") if key in cfg}
    if "baseline" in others:
        require_names(
            [others["baseline"]], "row", [row.name for row in rows], f"table `{path}`: `baseline` names"
        )
    others["runner"] = _make(Runner, cfg.get("runner", {}), path)
    return TableDeclaration(name, dataset, cfg["title"], rows, columns, **others)


def _build(kind: type, entries: Mapping[str, Any], path: Path) -> Row | Column:
    """Build a row or column; its unknown entries become values for the braces."""
    known = {key: value for key, value in entries.items() if key in kind.__dataclass_fields__}
    values = {key: value for key, value in entries.items() if key not in known}
    if wrong := [key for key, value in values.items() if not isinstance(value, str)]:
        raise DeclarationError(f"table `{path}`: `{wrong[0]}` of {entries.get('name')!r} has to be a string")
    return _make(kind, {**known, "values": values}, path)


def _make(kind: type, entries: Mapping[str, Any], path: Path) -> Any:
    try:
        return kind(**entries)
    except TypeError as error:
        raise DeclarationError(f"table `{path}`, {kind.__name__.lower()} {entries}: {error}") from error


def _check_names(rows: Sequence[Row], columns: Sequence[Column], path: Path) -> None:
    known, headings = [row.name for row in rows], [column.heading for column in columns]
    for what, names in (("row", known), ("column", headings)):
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise DeclarationError(f"table `{path}` has two {what}s named {repeated[0]!r}")
    names = [column.name for column in columns]
    for row in rows:
        require_names(row.columns or (), "column", names, f"table `{path}`: row {row.name!r} names")
    for i, row in enumerate(rows):
        above = [other.name for other in rows[:i] if other.pretrain] if row.pretrain else []
        where = f"table `{path}`: `start` of row {row.name!r} names"
        require_names([row.start] if row.start else (), "pre-trained row above it", above, where)
    for column in columns:
        where = f"table `{path}`: the paper's numbers of column {column.heading!r} name"
        require_names(column.paper, "row", known, where)


def positive(text: str) -> int:
    """Parse a number of seeds or of jobs: an integer of at least one."""
    if (number := int(text)) < 1:
        raise ArgumentTypeError(f"{text}: one or more")
    return number


def require_names(names: Iterable[str], what: str, known: Sequence[str], where: str) -> None:
    """Raise DeclarationError unless all of the names are known."""
    if unknown := [name for name in names if name not in known]:
        raise DeclarationError(f"{where} {unknown[0]!r}, which is no {what}; {what}s are {', '.join(known)}")
