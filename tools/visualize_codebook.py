"""Show a tokenizer config's tokens: patches that share a token, and how often tokens are used.

Writes sheets (PNG) and a self-contained page (HTML). Needs the extracted token store.
"""

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure
from mmengine.config import Config, DictAction

import mapet_mm.utils.logging  # noqa: F401
from mapet_mm.tokenizers import GridKMeans, TokenStore
from mapet_mm.tokenizers.images import NamedImages
from mapet_mm.tokenizers.run import build_images, build_tokenizer
from mapet_mm.utils.config import read_config
from mapet_mm.utils.errors import UserError, one_line_errors
from mapet_mm.visualization.codebook_sheet import (
    Patch,
    SheetRow,
    choose_members,
    draw_codebook_sheet,
    find_members,
    nearest_members,
)
from mapet_mm.visualization.report import DOTS_PER_INCH, Report, Section, format_table, write_report
from mapet_mm.visualization.token_statistics import TokenUsage, draw_usage, measure_usage, usage_table

TOKENS_PER_SHEET = 8


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="tokenizer config, for example configs/micro/kclip.py")
    parser.add_argument("--tokens", type=int, nargs="+", help="token ids to show, instead of --choose")
    parser.add_argument(
        "--choose", choices=("most-used", "random"), default="most-used", help="which tokens to show"
    )
    parser.add_argument("--count", type=int, default=16, help="how many tokens to choose (default 16)")
    parser.add_argument("--random", type=int, default=8, help="random patches of each token (default 8)")
    parser.add_argument(
        "--nearest",
        type=int,
        default=0,
        help="patches nearest to each token's centroid (default 0; needs a codebook, encodes images again)",
    )
    parser.add_argument(
        "--candidates",
        type=int,
        default=512,
        help="random patches of each token that --nearest searches (default 512)",
    )
    parser.add_argument(
        "--context", type=int, default=3, help="patches shown around each patch, on each side"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    parser.add_argument("--out", type=Path, help="folder to write; default: <token store>.codebook")
    parser.add_argument(
        "--cfg-options", nargs="+", action=DictAction, help="override settings: key=value ..."
    )
    args = parser.parse_args()
    if min(args.random, args.nearest, args.context) < 0 or args.random + args.nearest == 0:
        parser.error(
            "--random, --nearest and --context cannot be negative, and there must be patches to show"
        )
    if args.count < 1 or args.candidates < max(args.nearest, args.random):
        parser.error("--count must be positive, and --candidates at least --nearest and --random")
    return args


def choose_patches(
    args: argparse.Namespace, cfg: Config, images: NamedImages, store: TokenStore, usage: TokenUsage
) -> dict[int, list[SheetRow]]:
    """The rows to show of each token: first the patches nearest to its centroid, then random ones."""
    tokens = args.tokens or usage.most_used(args.count)
    if args.choose == "random" and not args.tokens:
        tokens = usage.random(args.count, args.seed)
    members = find_members(store, tokens, args.candidates, args.seed)
    nearest: dict[int, list[Patch]] = {}
    if args.nearest:
        tokenizer, preprocessor = build_tokenizer(cfg)
        if not isinstance(tokenizer, GridKMeans):
            raise UserError(f"--nearest needs centroids, and {cfg.tokenizer.type} has none: leave it out")
        store.require_tokenizer(tokenizer.digest, "the config's tokenizer")
        workers = cfg.get("dataloader", {}).get("num_workers", 2)
        nearest = nearest_members(tokenizer, preprocessor, images, members, args.nearest, workers)
    rows: dict[int, list[SheetRow]] = {}
    for token, patches in members.items():
        among = "" if len(patches) < args.candidates else f" of {args.candidates} random"
        shown = {f"nearest{among}": nearest[token]} if nearest else {}
        if args.random:
            shown["random"] = choose_members(patches, args.random, args.seed)
        of = f"of {usage.counts[token]:,} patches"
        rows[token] = [SheetRow(f"token {token}: {how} {of}", chosen) for how, chosen in shown.items()]
    return rows


def token_caption(token: int, usage: TokenUsage, class_names: list[str] | None) -> str:
    count = usage.counts[token]
    caption = f"{count:,} patches, {100 * count / usage.counts.sum():.2f} % of all."
    if usage.class_counts is None or not count:
        return caption
    in_class = usage.class_counts[token]
    name = class_names[in_class.argmax()] if class_names else in_class.argmax()
    return f"{caption} Class purity {100 * in_class.max() / count:.1f} % (class {name})."


def make_report(
    args: argparse.Namespace,
    images: NamedImages,
    store: TokenStore,
    usage: TokenUsage,
    drawn: dict[int, Figure],
) -> Report:
    """The page: statistics, usage, and a section for each token."""
    about_usage = (
        "Left: patches of each token in use; dotted, what each would have if all were used evenly. "
        "Right: how many tokens have how many patches."
    )
    class_names = images.class_names()
    return Report(
        "Codebook",
        f"Patches that {args.config} gives the same token, each framed in red in its surroundings. "
        "Patches nearest to a token's centroid show it at its best, random ones as it is.",
        usage_table(usage),
        [
            Section("How often tokens are used", about_usage, [draw_usage(usage)]),
            *(
                Section(f"Token {token}", token_caption(token, usage, class_names), [figure])
                for token, figure in drawn.items()
            ),
        ],
        facts=[
            ("token store", str(store.path)),
            ("tokenizer", store.tokenizer),
            ("images", f"{len(store) - len(store.missing()):,} of {len(store):,}"),
        ],
        commands=[shlex.join(["python", *sys.argv])],
    )


@one_line_errors
def main() -> None:
    """Measure, draw, write, and print what was written."""
    args = parse_args()
    cfg = read_config(args.config, options=args.cfg_options)
    out = args.out or Path(f"{cfg.get('token_store')}.codebook")
    images = build_images(cfg)
    store = TokenStore.open(cfg.token_store)
    usage = measure_usage(store, images.labels())
    rows = choose_patches(args, cfg, images, store, usage)
    draw = partial(draw_codebook_sheet, image_root=images.data_root, grid=store.grid, context=args.context)
    page = write_report(
        out / "index.html",
        make_report(args, images, store, usage, {token: draw(of) for token, of in rows.items()}),
    )
    draw_usage(usage).savefig(out / "usage.png", dpi=DOTS_PER_INCH)
    tokens = list(rows)
    sheets = [tokens[start : start + TOKENS_PER_SHEET] for start in range(0, len(tokens), TOKENS_PER_SHEET)]
    for number, sheet in enumerate(sheets, 1):
        figure = draw([row for token in sheet for row in rows[token]])
        figure.savefig(out / f"sheet_{number}.png", dpi=DOTS_PER_INCH)
    print(f"wrote {page}, usage.png and {len(sheets)} sheets beside it")
    print(format_table(usage_table(usage)))


if __name__ == "__main__":
    main()
