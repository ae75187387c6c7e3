"""Fill one of the paper's tables: do the runs that have no result yet, and write all beside the paper's.

    python tools/run_table.py objectives --dataset digits --seeds 3
    python tools/run_table.py objectives --dataset imagenet --launcher slurm --partition gpu
    python tools/run_table.py objectives --dataset imagenet --dry-run

After a kill or a failure, the same command resumes. Tables share pre-trainings, tokens and codebooks, and
several people may fill one table.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from mapet_mm.experiments.cluster import dist_lines, hours_report, printed, submit
from mapet_mm.experiments.fill import TableFiller, describe
from mapet_mm.experiments.local import LocalRunner
from mapet_mm.experiments.plan import Run
from mapet_mm.experiments.records import StageError
from mapet_mm.experiments.table import LAUNCHERS, Runner, load_table, positive
from mapet_mm.utils.errors import one_line_errors


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", help="name of a table of the dataset")
    parser.add_argument("--dataset", default="digits", help="name of a file in configs/tables")
    parser.add_argument("--seeds", type=positive, default=1, help="number of seeds per cell: 0, 1, ...")
    parser.add_argument("--jobs", type=positive, default=2, help="launcher local: runs at a time")
    parser.add_argument(
        "--out", type=Path, default=Path("work_dirs/tables"), help="folder for everything written"
    )
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="run only these rows")
    parser.add_argument("--columns", nargs="+", metavar="COLUMN", help="run only these columns")
    parser.add_argument("--collect", action="store_true", help="run nothing, write the results so far")
    parser.add_argument("--dry-run", action="store_true", help="run nothing, print the commands in order")
    parser.add_argument("--launcher", choices=LAUNCHERS, help="how to start runs; default: as the table says")
    parser.add_argument("--partition", help="launcher slurm: partition of the jobs")
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="=ARGUMENT", help="one more argument of sbatch"
    )
    return parser.parse_args()


@one_line_errors
def main() -> None:
    args = parse_args()
    command = f"python tools/run_table.py {args.table} --dataset {args.dataset} --seeds {args.seeds}"
    try:
        table = load_table(args.table, args.dataset)
        table = replace(table, runner=choose_runner(table.runner, args))
        filler = TableFiller(table, range(args.seeds), args.out, command)
        runs = filler.needed_runs(args.rows, args.columns)
        if args.dry_run:
            print_commands(filler, runs)
            return
        try:
            if not args.collect:
                run(filler, runs, args.jobs)
        finally:
            report(filler)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command resumes")


def choose_runner(runner: Runner, args: argparse.Namespace) -> Runner:
    """The table's runner, changed by the options and by what this machine has."""
    launcher = args.launcher or runner.launcher
    gpus = 0 if launcher == "local" else runner.gpus_per_node
    if launcher == "dist" and not args.dry_run:
        gpus = torch.cuda.device_count()
    partition = [f"--partition={args.partition}"] if args.partition else []
    sbatch = [*runner.sbatch, *partition, *args.sbatch]
    return replace(runner, launcher=launcher, gpus_per_node=gpus, sbatch=sbatch)


def run(filler: TableFiller, runs: list[Run], jobs: int) -> None:
    """Start the missing runs with the launcher of the table or of `--launcher`."""
    filler.table.require_folders()
    runner = filler.table.runner
    print(f"{filler.status()}\n{len(runs)} runs are needed: {describe(runs) or 'none'}")
    if runner.launcher == "slurm":
        print(f"submitted {submit(runs, runner)} jobs; the same command with --collect says how far they are")
        return
    require_gpus(runs, runner.gpus_per_node)
    jobs = jobs if runner.launcher == "local" else 1
    LocalRunner(runs, jobs, runner.launcher, runner.cpus_per_process, on_done=filler.write).run()


def require_gpus(runs: list[Run], here: int) -> None:
    """Raise an error before anything starts if a training needs more GPUs than there are."""
    largest = max(runs, key=lambda run: run.processes, default=None)
    if largest and largest.processes > max(here, 1):
        raise StageError(
            f"{largest.name} is meant for {largest.processes} GPUs, here are {here}: --launcher slurm "
            "submits the runs as jobs, --launcher dist --dry-run prints the commands for several machines"
        )


def report(filler: TableFiller) -> None:
    """Write the table, and print its status."""
    print(f"wrote {' and '.join(map(str, filler.write()))}")
    print("\n".join([filler.status(), *(f"warning: {line}" for line in filler.unknown_metrics())]))


def print_commands(filler: TableFiller, runs: list[Run]) -> None:
    """Print the commands of all missing runs, in order, and their GPU-hours."""
    runner = filler.table.runner
    if runner.launcher == "slurm":
        numbers = iter(range(1, len(runs) + 1))

        def send(words: list[str], script: str) -> str:
            job = f"job_{next(numbers)}"
            print(printed(words, script, job))
            return f"${{{job}%%;*}}"  # in a federation, sbatch prints `number;cluster`

        submit(runs, runner, send)
    else:
        for one in runs:
            print("\n".join(dist_lines(one, runner)))
    print(f"\n{len(runs)} runs: {describe(runs)}")
    if filler.table.gpu_hours:
        print("\n".join(hours_report(runs, filler.table.gpu_hours)))


if __name__ == "__main__":
    main()
