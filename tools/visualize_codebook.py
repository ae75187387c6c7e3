"""Show a tokenizer config's tokens: patches that share a token, and how often tokens are used.

Writes sheets (PNG) and a self-contained page (HTML). Needs the extracted token store.
"""

import argparse
import shlex
import sys
from pathlib import Path

from mmengine.config import Config

import mapet_mm.utils.logging  # noqa: F401
from mapet_mm.engine.runners.launch import read_config
from mapet_mm.structures.store import TokenStore
from mapet_mm.tokenizers import GridKMeans
from mapet_mm.tokenizers.images import NamedImages
from mapet_mm.tokenizers.run import build_images, build_tokenizer
from mapet_mm.utils.config import ConfigOptions
from mapet_mm.utils.errors import UserError, one_line_errors
from mapet_mm.visualization.codebook_report import CodebookPictures, Gallery, usage_table
from mapet_mm.visualization.codebook_sheet import Patch, choose_members, find_members
from mapet_mm.visualization.nearest_members import nearest_members
from mapet_mm.visualization.report import DOTS_PER_INCH, format_table, write_report
from mapet_mm.visualization.token_usage import TokenUsage, draw_usage, measure_usage


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
        "--cfg-options", nargs="+", action=ConfigOptions, help="override settings: key=value ..."
    )
    args = parser.parse_args()
    if min(args.random, args.nearest, args.context) < 0 or args.random + args.nearest == 0:
        parser.error(
            "--random, --nearest and --context cannot be negative, and there must be patches to show"
        )
    if args.count < 1 or args.candidates < max(args.nearest, args.random):
        parser.error("--count must be positive, and --candidates at least --nearest and --random")
    return args


def choose_tokens(args: argparse.Namespace, usage: TokenUsage) -> list[int]:
    if args.tokens:
        return list(dict.fromkeys(args.tokens))
    return usage.most_used(args.count) if args.choose == "most-used" else usage.random(args.count, args.seed)


def make_galleries(
    args: argparse.Namespace, cfg: Config, images: NamedImages, store: TokenStore, tokens: list[int]
) -> dict[int, list[Gallery]]:
    """The patches to show for each token: first those nearest to its centroid, then random ones."""
    members = find_members(store, tokens, args.candidates, args.seed)
    galleries: dict[int, list[Gallery]] = {token: [] for token in tokens}
    if args.nearest:
        for token, patches in find_nearest(args, cfg, images, store, members).items():
            among = "" if len(members[token]) < args.candidates else f" of {args.candidates} random"
            galleries[token].append(Gallery(f"nearest{among}", patches))
    if args.random:
        for token, patches in members.items():
            galleries[token].append(Gallery("random", choose_members(patches, args.random, args.seed)))
    return galleries


def find_nearest(
    args: argparse.Namespace,
    cfg: Config,
    images: NamedImages,
    store: TokenStore,
    members: dict[int, list[Patch]],
) -> dict[int, list[Patch]]:
    tokenizer, preprocessor = build_tokenizer(cfg)
    if not isinstance(tokenizer, GridKMeans):
        raise UserError(
            f"--nearest needs centroids, as k-CLIP has them; {cfg.tokenizer.type} has none: leave it out"
        )
    store.require_tokenizer(tokenizer.digest, "the config's tokenizer")
    loading = cfg.get("dataloader", {})
    return nearest_members(tokenizer, preprocessor, images, members, args.nearest, **loading)


@one_line_errors
def main() -> None:
    """Measure, draw, write, and print what was written."""
    args = parse_args()
    cfg = read_config(args.config, args.cfg_options)
    out = args.out or Path(f"{cfg.get('token_store')}.codebook")
    images = build_images(cfg)
    store = TokenStore.open(cfg.token_store)
    usage = measure_usage(store, images.labels())
    galleries = make_galleries(args, cfg, images, store, choose_tokens(args, usage))
    names = images.class_names()
    pictures = CodebookPictures(store, usage, galleries, images.data_root, args.context, names)
    write(pictures, args.config, out)
    print(format_table(usage_table(usage)))


def write(pictures: CodebookPictures, config: str, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    draw_usage(pictures.usage).savefig(out / "usage.png", dpi=DOTS_PER_INCH)
    sheets = pictures.sheets()
    for number, sheet in enumerate(sheets, 1):
        sheet.savefig(out / f"sheet_{number}.png", dpi=DOTS_PER_INCH)
    summary = (
        f"Patches that {config} gives the same token, each framed in red in its surroundings. "
        "Patches nearest to a token's centroid show it at its best, random ones as it is."
    )
    command = shlex.join(["python", *sys.argv])
    page = write_report(out / "index.html", pictures.report("Codebook", summary, [command]))
    print(f"wrote {page}, usage.png and {len(sheets)} sheets beside it")


if __name__ == "__main__":
    main()
