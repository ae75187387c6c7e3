"""Write the tables from the records so far, as Markdown and CSV, or draw them as one picture.

    python research/show.py digits/objectives --seeds 3
    python research/show.py fashion_mnist/objectives --seeds 3 --evaluation 2 --picture objectives.png

A table with a column of teraflops is drawn as quality over compute, all others as dots with error bars.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from lab.picture import draw_tables
from lab.records import read_all
from lab.render import Grid
from lab.show import FilledTable
from lab.tables import Table, load_table

from mapet_mm.evaluation import VERSION
from mapet_mm.utils.errors import one_line_errors


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="+", metavar="TABLE", help="for example digits/objectives")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds: 0, 1, ...")
    parser.add_argument(
        "--evaluation", type=int, default=VERSION, help="version of the frozen protocols (default: today's)"
    )
    parser.add_argument("--picture", type=Path, help="draw this file instead: .png, .svg or .pdf")
    parser.add_argument("--rows", nargs="+", default=[], metavar="ROW", help="of the picture, only these")
    parser.add_argument(
        "--columns", nargs="+", default=[], metavar="COLUMN", help="of the picture, only these"
    )
    return parser.parse_args()


def chosen(filled: FilledTable, rows: list[str], columns: list[str]) -> tuple[Table, Grid]:
    """A table with the named rows and columns only, and its cells."""
    filled.wanted(rows, columns)  # refuses unknown names
    table = filled.table
    if rows:
        table = replace(table, rows=[row for row in table.run_rows if row.name in rows])
    if columns:
        table = replace(table, columns=[one for one in table.columns if one.name in columns])
    return table, filled.grid()


@one_line_errors
def main() -> None:
    args = parse_args()
    records = read_all()
    tables = [load_table(name) for name in args.tables]
    filled = [FilledTable(table, range(args.seeds), records, args.evaluation) for table in tables]
    if args.picture:
        draw_tables([chosen(one, args.rows, args.columns) for one in filled]).savefig(args.picture, dpi=150)
        print(f"wrote {args.picture}")
    for one in filled:
        if not args.picture:
            print(f"wrote {' and '.join(map(str, one.write()))}")
        print(one.status())


if __name__ == "__main__":
    main()
