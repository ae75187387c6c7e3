"""Store the square of each image of a pre-training config's token store; run again to continue.

A training whose dataset is `StoredImages` then decodes nothing. Any number of processes on any number of
machines share the images through the token store's folder: start the same command any number of times, under
torchrun, under srun or by hand, at any time.
"""

import argparse

from command_line import add_config_options, described_parser

from mapet_mm.utils.errors import one_line_errors


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = described_parser(__doc__)
    parser.add_argument(
        "config", help="pre-training config, whose pipeline begins with the square and has LoadTokenGrid"
    )
    parser.add_argument(
        "--verify",
        type=int,
        nargs="?",
        const=256,
        metavar="IMAGES",
        help="write nothing: check the files, and the squares of this many random images (default 256)",
    )
    add_config_options(parser)
    return parser.parse_args()


@one_line_errors
def main() -> None:
    """Store or verify, and print how to train on the squares."""
    args = parse_args()
    from mapet_mm.engine.runners.launch import read_config
    from mapet_mm.tokenizers.store_images import SquareLoader, store_images, verify_images
    from mapet_mm.utils.commands import next_line
    from mapet_mm.utils.dist import is_first_process

    loader = SquareLoader.from_config(read_config(args.config, args.cfg_options))
    if args.verify is not None:
        squares, verification = verify_images(loader, args.verify)
        print(f"{squares.folder}: all files are whole, {verification}")
        return
    squares, num_decoded = store_images(loader)
    if is_first_process():
        total = int(squares.rows().sum())
        done = "wrote" if num_decoded else "kept"
        following = next_line(
            f"train with dataset=dict(type='mapet_mm.StoredImages', store='{loader.store.path}', "
            f"size={squares.size}, ...) and the rest of the pipeline"
        )
        print(f"{done} {squares.folder}: {total:,} squares of {squares.size} x {squares.size} px{following}")


if __name__ == "__main__":
    main()
