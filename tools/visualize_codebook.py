"""Show a tokenizer config's tokens: patches that share a token, and how often tokens are used.

Writes a self-contained page. Needs the extracted token store.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import add_config_options, described_parser

from mapet_mm.utils.errors import one_line_errors

if TYPE_CHECKING:
    from mapet_mm.visualization.token_statistics import TokenUsage

LIMIT = 512  # random patches of a token, of which those of as many images as possible are shown


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = described_parser(__doc__)
    parser.add_argument("config", help="tokenizer config, for example configs/micro/kclip.py")
    parser.add_argument("--tokens", type=int, nargs="+", help="token ids to show, instead of the most used")
    parser.add_argument("--count", type=int, default=16, help="how many of the most used (default 16)")
    parser.add_argument("--patches", type=int, default=8, help="random patches of each (default 8)")
    parser.add_argument("--context", type=int, default=3, help="patches shown around each, on each side")
    parser.add_argument("--out", type=Path, help="folder of the page; default: <token store>.codebook")
    add_config_options(parser)
    return parser.parse_args()


def token_caption(token: int, usage: "TokenUsage", class_names: list[str] | None) -> str:
    count = usage.counts[token]
    caption = f"{count:,} patches, {100 * count / usage.counts.sum():.2f} % of all."
    if usage.class_counts is None or not count:
        return caption
    in_class = usage.class_counts[token]
    name = class_names[in_class.argmax()] if class_names else in_class.argmax()
    return f"{caption} Class purity {100 * in_class.max() / count:.1f} % (class {name})."


@one_line_errors
def main() -> None:
    """Measure, draw, write, and print what was written."""
    args = parse_args()
    from mapet_mm.tokenizers import TokenStore
    from mapet_mm.tokenizers.fit_and_extract import build_images
    from mapet_mm.utils.config import read_config
    from mapet_mm.utils.tables import format_table
    from mapet_mm.visualization.codebook_sheet import (
        SheetRow,
        choose_members,
        draw_codebook_sheet,
        find_members,
        picture_reader,
    )
    from mapet_mm.visualization.report import Report, Section, write_report
    from mapet_mm.visualization.token_statistics import draw_usage, measure_usage, usage_table

    cfg = read_config(args.config, options=args.cfg_options)
    images = build_images(cfg)
    store = TokenStore.open(cfg.token_store)
    usage, names = measure_usage(store, images.labels()), images.class_names()
    about_usage = "Patches of each token in use; dotted, what each would have if all were used evenly."
    sections = [Section("How often tokens are used", about_usage, [draw_usage(usage)])]
    read = picture_reader(store)
    members = find_members(store, args.tokens or usage.most_used(args.count), LIMIT)
    for token, patches in members.items():
        row = SheetRow(f"token {token}, random patches", choose_members(patches, args.patches, seed=0))
        figure = draw_codebook_sheet([row], images.data_root, store.grid, args.context, read)
        sections.append(Section(f"Token {token}", token_caption(token, usage, names), [figure]))
    report = Report(
        "Codebook",
        f"Patches that {args.config} gives the same token, each framed in red in its surroundings.",
        usage_table(usage),
        sections,
        facts=[
            ("token store", str(store.path)),
            ("tokenizer", store.tokenizer),
            ("images", f"{len(store) - len(store.missing()):,} of {len(store):,}"),
        ],
        commands=[shlex.join(["python", *sys.argv])],
    )
    out = args.out or Path(f"{cfg.token_store}.codebook")
    print(f"wrote {write_report(out / 'index.html', report)}")
    print(format_table(report.results))


if __name__ == "__main__":
    main()
