"""Fill a table: run what has no result yet, and write what there is after each result."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from mapet_mm.experiments.declaration import TableDeclaration
from mapet_mm.experiments.plan import Cell, Plan, Run, plan_table
from mapet_mm.experiments.rendering import Grid, render_csv, render_markdown
from mapet_mm.experiments.results import ResultsFile, summarise
from mapet_mm.experiments.stages import Stage, StageError, StageRunner

# Imported once; the runs are forked from here.
PRELOAD = (
    "torch",
    "open_clip",
    "mmpretrain.apis",
    "mmseg.apis",
    "mapet_mm.models",
    "mapet_mm.datasets",
    "mapet_mm.engine",
    "mapet_mm.tokenizers",
)


class TableFiller:
    """One table of one data set, its runs, results and files.

    Args:
        table: the declaration.
        seeds: one training of every cell each.
        out: folder of all tables; runs, results and this table go below `<out>/<dataset>`.
        jobs: runs side by side, one thread each.
        command: the command line, for the table's foot.
        tell: takes each line of progress.
    """

    def __init__(
        self,
        table: TableDeclaration,
        seeds: Iterable[int],
        out: str | os.PathLike,
        jobs: int = 2,
        command: str = "",
        tell: Callable[[str], None] = print,
    ) -> None:
        self.table, self.seeds = table, list(seeds)
        self.command, self.tell = command, tell
        self.folder = Path(out) / table.dataset
        self.plan: Plan = plan_table(table, self.seeds, self.folder)
        self.runs = {run.name: run for run in self.plan.runs}
        self.results = ResultsFile(self.folder / "results.json")
        stages = [run.stage for run in self.plan.runs]
        self.runner = StageRunner(stages, self.folder, jobs, tell, keep_going=True, on_done=self._keep)
        for cell in self.missing:
            self._keep(self.runs[cell.run].stage)

    @property
    def missing(self) -> list[Cell]:
        """The cells without a result."""
        return [cell for cell in self.plan.cells if self.results.value(cell, self.runner.keys) is None]

    def needed_runs(self) -> list[Run]:
        """What has to be done for the missing cells, each after what it needs; done runs among them."""
        needed = {cell.run for cell in self.missing}
        for run in reversed(self.plan.runs):
            if run.name in needed:
                needed.update(run.needs)
        return [run for run in self.plan.runs if run.name in needed]

    def run(self, preload: Iterable[str] = PRELOAD) -> None:
        """Run everything that is missing; a failed run costs only the cells that need it.

        Args:
            preload: modules to import once, before the runs are forked.

        Raises:
            StageError: runs failed, after all others; the message has the ends of their logs.
        """
        names = {run.name for run in self.needed_runs()}
        there = len(self.plan.cells) - len(self.missing)
        self.tell(
            f"{self.table.title}: {there} of {len(self.plan.cells)} results are there, "
            f"{len(names)} runs for the others"
        )
        try:
            if names:
                self.runner.run(preload, only=names)
        finally:
            self.write()

    def run_command(self, run: Run, line: str) -> None:
        """Do one run by a command line of the shell, unless it is done.

        Raises:
            StageError: the command failed.
        """
        if self.runner.is_done(run.stage):
            return
        self.tell(f"$ {line}")
        started = time.monotonic()
        if code := subprocess.run(["bash", "-c", line]).returncode:
            raise StageError(f"`{line}` ended with code {code}: correct the cause, the same command resumes")
        self.runner.mark_done(run.stage, time.monotonic() - started)
        self._keep(run.stage)

    def write(self) -> tuple[Path, Path]:
        """Write Markdown and CSV with the results that there are; returns their paths."""
        cells = self.cells()
        markdown, sheet = (self.folder / f"{self.table.name}.{suffix}" for suffix in ("md", "csv"))
        self.folder.mkdir(parents=True, exist_ok=True)
        markdown.write_text(render_markdown(self.table, cells, self.facts()))
        sheet.write_text(render_csv(self.table, cells))
        return markdown, sheet

    def cells(self) -> Grid:
        """Each cell over its seeds, or why it is empty; a dash where its row is not evaluated."""
        grid = {}
        for row in self.table.rows:
            for column in self.table.columns:
                of_cell = [c for c in self.plan.cells if (c.row, c.column) == (row.name, column.heading)]
                values = [self.results.value(cell, self.runner.keys) for cell in of_cell]
                measured = summarise(value for value in values if value is not None)
                failed = any(cell.run in self.runner.failed for cell in of_cell)
                empty = ("failed" if failed else "not run") if of_cell else "-"
                grid[row.name, column.heading] = measured or empty
        return grid

    def facts(self) -> list[str]:
        """How the numbers came about."""
        missing = len(self.missing)
        seconds = self._seconds()
        return [
            f"Mean ± sample standard deviation over the seeds {', '.join(map(str, self.seeds))}; "
            "the last validation of each training, no selection; best mean in bold.",
            f"Command: `{self.command}`, {datetime.date.today().isoformat()}"
            + (f"; {missing} of {len(self.plan.cells)} results are still missing." if missing else "."),
            f"Compute: {seconds / 60:.0f} minutes of one thread in all, {self.runner.jobs} runs side by side "
            f"on {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}.",
        ]

    def _keep(self, stage: Stage) -> None:
        """Take the result of a finished evaluation over, whichever table ran it, and write the table."""
        run = self.runs[stage.name]
        if run.kind == "evaluation" and self.runner.is_done(stage):
            metrics = sorted({cell.metric for cell in self.plan.cells if cell.run == run.name})
            self.results.add(run, self.runner.keys[run.name], metrics, self.runner.seconds(stage))
            self.write()

    def _seconds(self) -> float:
        """Seconds of all that is done: evaluations as their results say, the others as their stamps do."""
        others = [run for run in self.plan.runs if run.kind != "evaluation"]
        done = sum(self.runner.seconds(run.stage) for run in others if self.runner.is_done(run.stage))
        return done + self.results.seconds(set(self.runs) - {run.name for run in others})


def describe(runs: Sequence[Run]) -> str:
    """How many runs of each kind, for a line of progress."""
    kinds = [run.kind for run in runs]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
