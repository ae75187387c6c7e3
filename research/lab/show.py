"""A table from its records: cells over seeds, and the files that show them."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lab.paths import OUT, RECORDS, RUNS
from lab.plan import Cell, Plan, id_of, plan_table
from lab.records import Record
from lab.render import Grid, Measured, render_csv, render_differences, render_markdown, summarise
from lab.tables import COSTS, DeclarationError, Table, require_names
from mapet_mm.evaluation import VERSION
from mapet_mm.utils.atomic_files import replace_file


class FilledTable:
    """A table with the records that fill it.

    Args:
        table: as `load_table` reads it.
        seeds: whose runs count.
        records: by identity.
        evaluation: version of the frozen protocols whose figures are shown.

    Raises:
        DeclarationError: some trainings in mixed precision ran in another one than the others.
    """

    def __init__(
        self, table: Table, seeds: Iterable[int], records: Mapping[str, Record], evaluation: int = VERSION
    ) -> None:
        self.table = table
        self.seeds = list(seeds)
        self.records = records
        self.evaluation = evaluation
        self.plan: Plan = plan_table(table, self.seeds, evaluation)
        precisions = sorted({record["precision"] for record in self._records() if "precision" in record})
        if len(precisions) > 1:
            raise DeclarationError(
                f"{table.name}: its trainings ran in {' and in '.join(precisions)}, by their machines: "
                f"no table mixes them; remove the records of one, in {RUNS} or {RECORDS}"
            )

    def _records(self) -> list[Record]:
        return [self.records[run.id] for run in self.plan.runs.values() if run.id in self.records]

    def wanted(self, rows: Sequence[str] = (), columns: Sequence[str] = ()) -> list[Cell]:
        """The cells of these rows and columns, of all if none are named.

        Raises:
            DeclarationError: a name is unknown.
        """
        require_names(rows, [row.name for row in self.table.run_rows], f"{self.table.name}: row")
        require_names(columns, [one.name for one in self.table.columns], f"{self.table.name}: column")
        headings = [one.heading for one in self.table.columns if not columns or one.name in columns]
        in_rows = [cell for cell in self.plan.cells if not rows or cell.row in rows]
        return [cell for cell in in_rows if cell.column in headings]

    def missing(self, cells: Iterable[Cell]) -> list[str]:
        """Keys of the runs whose records these cells lack."""
        return list(dict.fromkeys(cell.run for cell in cells if id_of(cell.run) not in self.records))

    def grid(self) -> Grid:
        """Each cell over its seeds, or why it is empty; a dash if its row is not evaluated."""
        cells: dict[tuple[str, str], list[Cell]] = {}
        for row in self.table.run_rows:
            for column in self.table.columns:
                cells[row.name, column.heading] = []
        for cell in self.plan.cells:
            cells[cell.row, cell.column].append(cell)
        return {place: self._measured(found) if found else "-" for place, found in cells.items()}

    def _measured(self, cells: Sequence[Cell]) -> Measured | str:
        done = [cell for cell in cells if id_of(cell.run) in self.records]
        if not done:
            return "not run"
        values = {}
        for cell in done:
            value = self.value(cell)
            if value is not None:
                values[cell.seed] = value
        return summarise(values) or f"no `{cells[0].metric}`"

    def value(self, cell: Cell) -> float | None:
        """A cell's figure or cost; None if it has no record, or its record does not say it."""
        record = self.records.get(id_of(cell.run))
        if record is None:
            return None
        if cell.metric in COSTS:
            return self._cost(cell)
        return record["metrics"].get(cell.metric)

    def _cost(self, cell: Cell) -> float | None:
        """Minutes of all that made the tokens or the pre-training, or the teraflops of the latter.

        A row that continues another one costs what both took.
        """
        kind, _, unit = cell.metric.partition("/")
        runs = [run for run in self.plan.with_needs([cell.run]) if run.kind == kind]
        records = [self.records.get(run.id, {}) for run in runs]
        if unit == "minutes":
            return sum(record.get("seconds", 0.0) for record in records) / 60
        counts = [record.get("teraflops") for record in records]
        return None if None in counts else sum(counts)

    def facts(self) -> list[str]:
        """Lines below the table: how the numbers were made."""
        records = self._records()
        missing = sum(id_of(cell.run) not in self.records for cell in self.plan.cells)
        seconds = sum(record["seconds"] for record in records)
        machines = "; ".join(sorted({record["machine"] for record in records})) or "no machine yet"
        seeds = f"Seed {self.seeds[0]} only"
        if len(self.seeds) > 1:
            seeds = f"Mean ± sample standard deviation over the seeds {', '.join(map(str, self.seeds))}"
        status = f"; {missing} of {len(self.plan.cells)} results are still missing." if missing else "."
        return [
            f"{seeds}; the last validation of each training, no selection; the best in bold.",
            f"Frozen features by version {self.evaluation} of the protocols.",
            f"Shown on {datetime.date.today().isoformat()}{status}",
            f"Compute: {seconds / 60:.0f} minutes of runs in all, on {machines}.",
        ]

    def status(self) -> str:
        """One line: the number of results."""
        there = sum(id_of(cell.run) in self.records for cell in self.plan.cells)
        return f"{self.table.title}: {there} of {len(self.plan.cells)} results are there"

    def markdown(self) -> str:
        """The table, and the differences from its baseline."""
        cells = self.grid()
        return render_markdown(self.table, cells, self.facts()) + render_differences(self.table, cells)

    def write(self, folder: Path = OUT) -> tuple[Path, Path]:
        """Write the results so far as Markdown and CSV; returns the two paths."""
        markdown = folder / f"{self.table.name}.md"
        sheet = folder / f"{self.table.name}.csv"
        markdown.parent.mkdir(parents=True, exist_ok=True)
        replace_file(markdown, self.markdown().encode())
        replace_file(sheet, render_csv(self.table, self.grid()).encode())
        return markdown, sheet
