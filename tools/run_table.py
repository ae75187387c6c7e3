"""Fill one of the paper's tables: do the runs that have no result yet, and write all beside the paper's.

    python tools/run_table.py objectives --dataset digits --seeds 3
    python tools/run_table.py objectives --dataset imagenet --launcher slurm --partition gpu
    python tools/run_table.py objectives --dataset imagenet --dry-run

After a kill or a failure, the same command resumes. Tables share pre-trainings, tokens and codebooks, and
several people may fill one table.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from command_line import described_parser
from experiments.declaration import LAUNCHERS, Runner, load_table
from experiments.fill import TableFiller, describe
from experiments.local import LocalRunner, launch_words, run_job
from experiments.plan import Run
from experiments.records import StageError
from experiments.slurm import submit

from mapet_mm.utils.errors import one_line_errors


def parse_args() -> argparse.Namespace:
    parser = described_parser(__doc__)
    parser.add_argument("table", help="name of a table of the dataset")
    parser.add_argument("--dataset", default="digits", help="name of a file in configs/tables")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds per cell: 0, 1, ...")
    parser.add_argument("--jobs", type=int, default=2, help="launcher local: runs at a time")
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
    if sys.argv[1:2] == ["--job"]:  # the script of a Slurm job
        run_job(*sys.argv[2:])
        return
    args = parse_args()
    command = f"python tools/run_table.py {args.table} --dataset {args.dataset} --seeds {args.seeds}"
    try:
        table = load_table(args.table, args.dataset)
        table = replace(table, runner=choose_runner(table.runner, args))
        filler = TableFiller(table, range(args.seeds), args.out, command)
        runs = filler.needed_runs(args.rows, args.columns)
        if args.dry_run:
            print_commands(runs, table.runner)
            return
        try:
            if not args.collect:
                run(filler, runs, args.jobs)
        finally:
            print(f"wrote {' and '.join(map(str, filler.write()))}")
            print(filler.status())
    except KeyboardInterrupt:
        sys.exit("Stopped. Run the same command again to continue.")


def choose_runner(runner: Runner, args: argparse.Namespace) -> Runner:
    """The table's runner, changed by the options and by this machine's GPUs."""
    launcher = args.launcher or runner.launcher
    gpus = 0 if launcher == "local" else runner.gpus_per_node
    if launcher == "dist" and not args.dry_run:
        import torch

        gpus = torch.cuda.device_count()
    partition = [f"--partition={args.partition}"] if args.partition else []
    sbatch = [*runner.sbatch, *partition, *args.sbatch]
    return replace(runner, launcher=launcher, gpus_per_node=gpus, sbatch=sbatch)


def run(filler: TableFiller, runs: list[Run], jobs: int) -> None:
    """Start the missing runs with the launcher of the table or of `--launcher`."""
    if missing := [folder for folder in filler.table.data.get("folders", ()) if not os.path.isdir(folder)]:
        raise StageError(f"folder {missing[0]} is missing: put the data of this table there")
    runner = filler.table.runner
    print(f"{filler.status()}\n{len(runs)} runs are needed: {describe(runs) or 'none'}")
    if runner.launcher == "slurm":
        print(f"submitted {submit(runs, runner)} jobs; the same command with --collect says how far they are")
        return
    largest = max(runs, key=lambda run: run.processes, default=None)
    if largest and largest.processes > max(runner.gpus_per_node, 1):
        raise StageError(
            f"{largest.name} is meant for {largest.processes} GPUs, here are {runner.gpus_per_node}: "
            "--launcher slurm submits jobs for several machines, --dry-run prints the commands"
        )
    jobs = jobs if runner.launcher == "local" else 1
    LocalRunner(runs, jobs, runner.launcher, runner.cpus_per_process, on_done=filler.write).run()


def print_commands(runs: list[Run], runner: Runner) -> None:
    """Print the commands of all missing runs, in order."""
    for one in runs:
        words = launch_words(one, runner.launcher, runner.cpus_per_process)
        print(one.typed(["python" if word == sys.executable else word for word in words]))
    print(f"\n{len(runs)} runs: {describe(runs)}")


if __name__ == "__main__":
    main()
