"""Write the frozen features of a folder of images, and their names in the same order.

    mapet-mm embed FOLDER --model RUN --out DIR
    mapet-mm embed FOLDER --model CONFIG CHECKPOINT --out DIR --patches

MODEL is named as in mapet-mm evaluate. DIR gets features.npy, float16, an image a row, and names.txt. Images
that cannot be decoded are left out and named. After a kill, the same command resumes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from command_line import add_cache_option, add_tiles_option, described_parser

from mapet_mm.cli.data_options import add_picture_options, add_workers_option, picture_options
from mapet_mm.utils.errors import UserError, one_line_errors


def parse_args() -> argparse.Namespace:
    parser = described_parser(__doc__)
    parser.add_argument("folder", type=Path, help="of images, searched recursively")
    parser.add_argument("--model", nargs="+", required=True, metavar=("MODEL", "CHECKPOINT"), help="a model")
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument("--patches", action="store_true", help="write the patch tokens, too: patches.npy")
    add_workers_option(parser)
    add_picture_options(parser)
    add_tiles_option(parser)
    add_cache_option(parser)
    return parser.parse_args()


@one_line_errors
def main() -> None:
    args = parse_args()
    from mmengine.logging import MMLogger

    from mapet_mm.evaluation.embed import embed
    from mapet_mm.evaluation.folders import pictures_in_numbers
    from mapet_mm.evaluation.images import Data
    from mapet_mm.evaluation.models import load_model
    from mapet_mm.utils.dist import choose_device, print_once, say_share

    say_share()
    choose_device()
    MMLogger.get_instance("embed", log_level="WARNING")  # MMEngine logs initialisations
    if len(args.model) > 2:
        raise UserError(f"--model {' '.join(args.model)}: one model and one checkpoint")
    if not args.folder.is_dir():
        raise UserError(f"{args.folder}: no such folder")
    pictures = pictures_in_numbers(picture_options(args), str(args.folder))
    model = load_model(*args.model, pictures=pictures)
    data = Data(str(args.folder), workers=args.workers, tiles=args.tiles)
    for file in embed(model, data, args.out, args.cache, args.patches):
        print_once(f"wrote {file}")


if __name__ == "__main__":
    main()
