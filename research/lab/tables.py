"""A table as plain Python: rows, columns, and the config that each cell runs.

    Table(
        title="Pre-training objectives on ImageNet-1k",
        rows=[Row("MIM", pretrain="configs/mim/mim_vit-{size}-p16_..._in1k.py", values=dict(method="mim"))],
        columns=[Column("ViT-T, fine-tuning", "top-1, %", "configs/mapet/benchmarks/...", "accuracy/top1",
                        values=dict(size="tiny"), paper={"MIM": 74.9})],
    )

A name in braces is replaced by the row's value of that name, or else by the column's.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.paths import TABLES
from mapet_mm.utils.errors import UserError

COSTS = ("tokenizer/minutes", "pre-training/minutes", "pre-training/teraflops")


class DeclarationError(UserError):
    """A table does not exist, or its declaration is wrong; the message is one line."""


@dataclass(frozen=True)
class Row:
    """One row that is run: what is evaluated."""

    name: str  # as the paper writes it
    pretrain: str | None = None  # config of the pre-training, None for none
    tokenizer: str | None = None  # tokenizer config whose tokens are read, None for the table's, "" for none
    options: Mapping[str, Any] = field(default_factory=dict)  # changes to `pretrain`, as in --cfg-options
    start: str | None = None  # the row above whose pre-training this one continues, None for none
    curve: str | None = None  # in a picture over compute, the curve with this row's point, None for its own
    columns: Sequence[str] | None = None  # names of the columns in which it is evaluated, None for all
    data: str | None = None  # dataset of the pre-training, with {seed} for each seed's own; None: the table's
    values: Mapping[str, str] = field(default_factory=dict)  # values for braces; they override the column's


@dataclass(frozen=True)
class Literature:
    """One row of numbers that the paper takes from other papers: data, nothing is run."""

    name: str
    numbers: Mapping[str, float]  # by the column's name


@dataclass(frozen=True)
class Data:
    """Where a dataset comes from: the command that makes it, or the folders that must exist."""

    command: Sequence[str] = ()
    outputs: Sequence[str] = ()
    folders: Sequence[str] = ()


@dataclass(frozen=True)
class Column:
    """One column: how rows are evaluated."""

    name: str  # as the paper writes it
    unit: str  # what is measured and its unit
    config: str  # of the evaluation
    metric: str  # name in the training's log or among the frozen figures; the last value counts
    options: Mapping[str, Any] = field(default_factory=dict)  # changes to `config`, as in --cfg-options
    data: str | None = None  # the dataset to evaluate on, None for the table's
    source: Data = field(default_factory=Data)  # where that dataset comes from, if it is not the table's
    paper: Mapping[str, float] = field(default_factory=dict)  # the paper's numbers, by the row's name
    values: Mapping[str, str] = field(default_factory=dict)  # values for the braces in configs

    @property
    def heading(self) -> str:
        """Name and unit, unique among the columns."""
        return f"{self.name} ({self.unit})"

    @property
    def is_cost(self) -> bool:
        """True for the cost of a row, false for its quality."""
        return self.metric in COSTS


@dataclass(frozen=True)
class Table:
    """A table, declared for a dataset."""

    title: str
    dataset: str  # its configs are read for this one; empty where they name their data
    rows: Sequence[Row | Literature]
    columns: Sequence[Column]
    tokenizer: str | None = None  # of the rows that name none
    baseline: str | None = None  # the row that all others are compared with; None for none
    notes: Sequence[str] = ()  # what readers need to know, one line each
    data: Data = field(default_factory=Data)
    gpus_per_node: int = 0  # of the machines that its recipes are meant for; 0 for runs on the CPU
    cpus_per_process: int = (
        1  # threads of a process, a fixed number, so that results do not depend on the machine
    )
    name: str = ""  # `<file>/<table>`, set by `load_table`

    @property
    def run_rows(self) -> list[Row]:
        """The rows that are run."""
        return [row for row in self.rows if isinstance(row, Row)]


def list_tables(folder: Path = TABLES) -> dict[str, Path]:
    """File of each table by its name, `<file>/<table>`."""
    files = sorted(folder.glob("*.py"))
    return {f"{file.stem}/{table}": file for file in files for table in runpy.run_path(str(file))["TABLES"]}


def load_table(name: str, folder: Path = TABLES) -> Table:
    """Read a table, for example `digits/objectives`.

    Raises:
        DeclarationError: there is no such table, names repeat, or a row or column names what is not there.
    """
    stem, _, table_name = name.partition("/")
    file = folder / f"{stem}.py"
    if not file.is_file():
        raise DeclarationError(f"table {name!r} does not exist; there are: {', '.join(list_tables(folder))}")
    tables = runpy.run_path(str(file))["TABLES"]
    require_names([table_name], tables, f"{file}: table")
    declared = tables[table_name]
    table = Table(**{**vars(declared), "name": name})
    _check_names(table)
    return table


def _check_names(table: Table) -> None:
    """Raise DeclarationError for names that repeat or refer to nothing."""
    row_names = [row.name for row in table.rows]
    column_names = [column.name for column in table.columns]
    _require_different(row_names, f"{table.name} has two rows")
    _require_different([column.heading for column in table.columns], f"{table.name} has two columns")
    above: list[str] = []
    for row in table.run_rows:
        require_names(row.columns or (), column_names, f"{table.name}, {row.name!r}: column")
        require_names([row.start] if row.start else (), above, f"{table.name}, {row.name!r}: start")
        if row.pretrain:
            above.append(row.name)
    require_names([table.baseline] if table.baseline else (), row_names, f"{table.name}: baseline")
    for column in table.columns:
        require_names(column.paper, row_names, f"{table.name}: row of the paper in {column.name!r}")


def _require_different(names: Sequence[str], what: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise DeclarationError(f"{what} named {name!r}")


def require_names(names: Iterable[str], known: Iterable[str], noun: str) -> None:
    """Raise DeclarationError unless all of the names are known."""
    known = list(known)
    for name in names:
        if name not in known:
            raise DeclarationError(f"{noun} {name!r} does not exist; there are: {', '.join(known)}")
