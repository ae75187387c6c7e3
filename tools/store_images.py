"""Store the square of each image of a pre-training config's token store; run again to continue.

A training whose dataset is `StoredImages` then decodes nothing. Any number of processes on any number of
machines share the images through the token store's folder: start the same command any number of times, under
torchrun, under srun or by hand, at any time.
"""

import argparse
from typing import TYPE_CHECKING

from command_line import add_config_options, described_parser, given_options
from mmengine.config import Config

from mapet_mm.utils.commands import next_line
from mapet_mm.utils.config import shell_command
from mapet_mm.utils.errors import one_line_errors

if TYPE_CHECKING:
    from mapet_mm.structures.squares import Squares


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
    parser.add_argument(
        "--retry-skipped",
        action="store_true",
        help="of a method without tokens: try the images again that were left out",
    )
    add_config_options(parser)
    return parser.parse_args()


@one_line_errors
def main() -> None:
    """Store or verify, and print how to train on the squares."""
    args = parse_args()
    from mapet_mm.engine.runners.launch import read_config
    from mapet_mm.tokenizers.squares import SquareLoader, store_images, verify_images
    from mapet_mm.utils.dist import is_first_process, say_share

    say_share()
    cfg = read_config(args.config, args.cfg_options)
    loader = SquareLoader.from_config(cfg)
    if args.verify is not None:
        squares, verification = verify_images(loader, args.verify)
        print(f"{squares.folder}: all files are whole, {verification}")
        return
    squares, num_decoded = store_images(loader, args.retry_skipped)
    if is_first_process():
        total = int(squares.has_square().sum())
        done = "wrote" if num_decoded else "kept"
        stored = f"{total:,} squares of {squares.size} x {squares.size} px"
        print(f"{done} {squares.folder}: {stored}{next_line(next_step(cfg, args, squares))}")


def next_step(cfg: Config, args: argparse.Namespace, squares: "Squares") -> str:
    """The training command; of a config that decodes images, with the dataset to put in their place."""
    if "StoredImages" in str(cfg.train_dataloader.dataset):
        return shell_command(cfg, ["train", args.config, *given_options(args)])
    dataset = dict(type="mapet_mm.StoredImages", store=str(squares.store.path), size=squares.size)
    return (
        f"{shell_command(cfg, ['train', 'CONFIG'])}  # {args.config} with the dataset {dataset} and the "
        "rest of its pipeline"
    )


if __name__ == "__main__":
    main()
