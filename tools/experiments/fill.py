"""Fill a table: find the runs that lack a result, show their states, and write the table."""

from __future__ import annotations

import contextlib
import datetime
import os
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from experiments.declaration import TableDeclaration, require_names
from experiments.plan import Cell, Run, plan_table
from experiments.records import StageError, is_done, note_teraflops, record_of
from experiments.render import Grid, Measured, render_csv, render_differences, render_markdown, summarise
from experiments.slurm import live_jobs
from mmengine.config import DictAction

from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.config import read_config
from mapet_mm.utils.errors import UserError

TERAFLOPS = "pre-training/teraflops"


class TableFiller:
    """One table: its plan, the state of its runs, and its files below `<out>/<dataset>`.

    Every cell is trained once per seed; `command` is shown below the table.
    """

    def __init__(
        self, table: TableDeclaration, seeds: Iterable[int], out: str | os.PathLike, command: str = ""
    ) -> None:
        self.table, self.seeds, self.command = table, list(seeds), command
        self.folder = Path(out) / table.dataset
        self.plan = plan_table(table, self.seeds, self.folder)

    def needed_runs(
        self, rows: Sequence[str] | None = None, columns: Sequence[str] | None = None
    ) -> list[Run]:
        """The runs for the cells without a result, done ones included, each after those that it needs.

        Only for some rows and columns, if they are named; raises DeclarationError for unknown names.
        """
        require_names(rows or (), [row.name for row in self.table.rows], f"{self.table.name}: row")
        require_names(columns or (), [one.name for one in self.table.columns], f"{self.table.name}: column")
        headings = [one.heading for one in self.table.columns if columns is None or one.name in columns]
        cells = [cell for cell in self.plan.cells if rows is None or cell.row in rows]
        return self.plan.closure(c.run for c in cells if c.column in headings and not is_done(c.run))

    def states(self) -> dict[str, str]:
        """State of each run by its folder: done, failed, not run, or the state of its Slurm job."""
        states: dict[str, str] = {}
        with contextlib.suppress(StageError):  # no Slurm here
            states |= {folder: state.lower() for folder, (_, state) in live_jobs(self.plan.runs).items()}
        for run in self.plan.runs:
            failed = os.path.exists(f"{run.folder}/failed")
            states.setdefault(run.folder, "done" if record_of(run) else "failed" if failed else "not run")
        return states

    def status(self) -> str:
        """One line: the number of results, and the states of the runs for the others."""
        counts = Counter(self.states().values())
        there = sum(is_done(cell.run) for cell in self.plan.cells)
        runs = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        return f"{self.table.title}: {there} of {len(self.plan.cells)} results are there; runs: {runs}"

    def write(self) -> tuple[Path, Path]:
        """Write the existing results as Markdown and CSV; returns the two paths."""
        cells = self.cells()
        markdown, sheet = (self.folder / f"{self.table.name}.{suffix}" for suffix in ("md", "csv"))
        self.folder.mkdir(parents=True, exist_ok=True)
        text = render_markdown(self.table, cells, self.facts()) + render_differences(self.table, cells)
        replace_file(markdown, text.encode())
        replace_file(sheet, render_csv(self.table, cells).encode())
        return markdown, sheet

    def cells(self) -> Grid:
        """Each cell over its seeds, or why it is empty; a dash if its row is not evaluated."""
        states = self.states()
        places = [(row.name, column.heading) for row in self.table.rows for column in self.table.columns]
        of_cell: dict[tuple[str, str], list[Cell]] = {place: [] for place in places}
        for cell in self.plan.cells:
            of_cell[cell.row, cell.column].append(cell)
        return {place: self._measured(cells, states) if cells else "-" for place, cells in of_cell.items()}

    def _measured(self, cells: Sequence[Cell], states: Mapping[str, str]) -> Measured | str:
        logged = {cell.seed: metrics for cell in cells if (metrics := self._metrics(cell)) is not None}
        metric = cells[0].metric
        values = {seed: metrics[metric] for seed, metrics in logged.items() if metric in metrics}
        if measured := summarise(values):
            return measured
        failed = any(states[run.folder] == "failed" for run in self.plan.closure(c.run for c in cells))
        return f"no `{metric}`" if logged else "failed" if failed else "not run"

    def _metrics(self, cell: Cell) -> dict[str, float] | None:
        """The metrics of a cell's evaluation and the cost of the runs it needs; None if it was not run.

        `tokenizer/minutes` has all that made the tokens: training, codebook, extraction.
        `pre-training/teraflops` is counted only where a column asks for it and the record does not say it.
        """
        if not (record := record_of(cell.run)):
            return None
        costs = dict.fromkeys(("tokenizer/minutes", "pre-training/minutes"), 0.0)
        needed = self.plan.closure([cell.run])
        for run in needed:
            if (key := f"{run.kind}/minutes") in costs and (made := record_of(run)):
                costs[key] += made["seconds"] / 60
        if cell.metric == TERAFLOPS:
            with contextlib.suppress(OSError, UserError):  # images or tokens are not on this machine
                costs[TERAFLOPS] = sum(teraflops_of(run) for run in needed if run.kind == "pre-training")
        return record["metrics"] | costs

    def facts(self) -> list[str]:
        """Lines below the table: how the numbers were made."""
        missing = sum(not is_done(cell.run) for cell in self.plan.cells)
        records = [record for run in self.plan.runs if (record := record_of(run))]
        seconds = sum(record["seconds"] for record in records)
        machines = "; ".join(sorted({record["machine"] for record in records})) or "no machine yet"
        seeds = ", ".join(map(str, self.seeds))
        several = len(self.seeds) > 1
        of = f"Mean ± sample standard deviation over the seeds {seeds}" if several else f"Seed {seeds} only"
        return [
            f"{of}; the last validation of each training, no selection; the best in bold.",
            f"Command: `{self.command}`, {datetime.date.today().isoformat()}"
            + (f"; {missing} of {len(self.plan.cells)} results are still missing." if missing else "."),
            f"Compute: {seconds / 60:.0f} minutes of runs in all, on {machines}; torch {version('torch')}.",
        ]


def teraflops_of(run: Run) -> float:
    """Teraflops of a training's products, alike on any machine; noted in its record, if it has one."""
    record = record_of(run) or {}
    if "teraflops" in record:
        return record["teraflops"]
    from flops import training_flops  # imports MMPretrain, which takes seconds

    parser = ArgumentParser()
    parser.add_argument("--cfg-options", nargs="*", action=DictAction)  # as tools/train.py reads them
    options = parser.parse_args(run.command[run.command.index("--cfg-options") :]).cfg_options
    teraflops = training_flops(read_config(run.config, run.data, options), run.processes) / 1e12
    if record:
        note_teraflops(run, teraflops)
    return teraflops


def describe(runs: Sequence[Run]) -> str:
    """The number of runs of each `kind`."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter(run.kind for run in runs).items())
