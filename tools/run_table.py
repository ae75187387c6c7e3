"""Fill one of the paper's tables: run what has no result yet, write it beside the paper's numbers.

    python tools/run_table.py objectives --dataset digits --seeds 3
    python tools/run_table.py objectives --dataset imagenet --dry-run

Killed or failed, the same command resumes; pre-trainings, tokens and codebooks are shared between tables.
"""

import argparse
import shlex
import sys
from pathlib import Path

from mapet_mm.errors import UserError, one_line_errors
from mapet_mm.experiments.commands import command_line, hours_report
from mapet_mm.experiments.declaration import DATASETS, load_table
from mapet_mm.experiments.filling import TableFiller, describe


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", help="name of a table, a file below configs/tables/<dataset>")
    parser.add_argument("--dataset", choices=DATASETS, default="digits")
    parser.add_argument(
        "--seeds", type=int, default=1, help="trainings of each cell, with the seeds 0, 1, ..."
    )
    parser.add_argument("--jobs", type=int, default=2, help="digits: runs side by side, one thread each")
    parser.add_argument("--out", type=Path, default=Path("work_dirs/tables"), help="folder for all it writes")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="only these rows")
    parser.add_argument("--collect", action="store_true", help="run nothing, write what results there are")
    parser.add_argument("--dry-run", action="store_true", help="run nothing, print the commands in order")
    parser.add_argument(
        "--launcher", choices=["dist", "slurm"], default="dist", help="imagenet: how to start"
    )
    parser.add_argument("--partition", default="PARTITION", help="imagenet: Slurm's partition")
    return parser.parse_args()


@one_line_errors
def main() -> None:
    args = parse_args()
    command = f"python tools/run_table.py {args.table} --dataset {args.dataset} --seeds {args.seeds}"
    try:
        table = load_table(args.table, args.dataset).only(args.rows)
        filler = TableFiller(table, range(args.seeds), args.out, args.jobs, command)
        if args.dry_run:
            print_commands(filler, args)
            return
        if not args.collect:
            require_folders(table.data.get("folders", ()))
            run(filler, args)
        print(f"wrote {' and '.join(map(str, filler.write()))}")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command resumes")


def run(filler: TableFiller, args: argparse.Namespace) -> None:
    """On digits side by side in this process; on ImageNet one command after another, on all GPUs."""
    if filler.table.dataset == "digits":
        filler.run()
        return
    for one in filler.needed_runs():
        filler.run_command(one, command_line(one, args.launcher, args.partition))


def print_commands(filler: TableFiller, args: argparse.Namespace) -> None:
    """The commands of everything that is missing, in order, and what they take."""
    runs = filler.needed_runs()
    for one in runs:
        if filler.table.dataset == "digits":
            print(shlex.join(["python", *one.command]))
        else:
            print(command_line(one, args.launcher, args.partition))
    print(f"\n{len(runs)} runs: {describe(runs)}")
    if filler.table.dataset == "imagenet":
        print("\n".join(hours_report(runs, filler.table.gpu_hours)))


def require_folders(folders: list[str]) -> None:
    """Stop before anything is built if the data is not there."""
    for folder in folders:
        if not Path(folder).is_dir():
            raise UserError(f"folder {folder} is not there: this table needs it; put the data there")


if __name__ == "__main__":
    main()
