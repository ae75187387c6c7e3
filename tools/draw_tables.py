"""Draw filled tables as one picture with error bars: the results of each row, or quality over compute.

    python tools/draw_tables.py objectives tokenizer_choice --dataset fashion_mnist_20000 --seeds 3 \\
        --picture results.png --columns k-NN "attentive probe" purity

Draws the results so far and says what is missing; `tools/run_table.py` fills the tables.
"""

from dataclasses import replace
from pathlib import Path

from command_line import described_parser
from experiments.declaration import load_table, require_names
from experiments.fill import TableFiller
from experiments.picture import draw_tables

from mapet_mm.utils.errors import one_line_errors


@one_line_errors
def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("tables", nargs="+", metavar="TABLE", help="names of tables of the dataset")
    parser.add_argument("--dataset", default="digits", help="name of a file in configs/tables")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds that were run")
    only = "of tables that have them, only these"
    parser.add_argument("--rows", nargs="+", default=[], metavar="ROW", help=only)
    parser.add_argument("--columns", nargs="+", default=[], metavar="COLUMN", help=only)
    parser.add_argument("--out", type=Path, default=Path("work_dirs/tables"), help="folder of all tables")
    parser.add_argument("--picture", type=Path, required=True, help="the file to write: .png, .svg or .pdf")
    args = parser.parse_args()
    tables = [load_table(name, args.dataset) for name in args.tables]
    require_names(args.rows, [row.name for table in tables for row in table.rows], "row")
    require_names(args.columns, [column.name for table in tables for column in table.columns], "column")
    fillers = [TableFiller(table, range(args.seeds), args.out) for table in tables]
    filled = []
    for filler in fillers:
        rows = [row for row in filler.table.rows if row.name in args.rows] or filler.table.rows
        columns = [one for one in filler.table.columns if one.name in args.columns] or filler.table.columns
        filled.append((replace(filler.table, rows=rows, columns=columns), filler.cells()))
    draw_tables(filled).savefig(args.picture, dpi=150)
    print("\n".join([f"wrote {args.picture}", *(filler.status() for filler in fillers)]))


if __name__ == "__main__":
    main()
