"""Tokenise a tokenizer config's images into its token store; run again to continue after an interruption.

Any number of processes on any number of machines share the images through the token store's folder: start the
same command any number of times, under torchrun, under srun or by hand, at any time.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import add_tokenizer_options, described_parser
from mmengine.config import Config

from mapet_mm.utils.commands import next_line
from mapet_mm.utils.config import in_package, shell_command
from mapet_mm.utils.config import read_config as read_file
from mapet_mm.utils.errors import one_line_errors

if TYPE_CHECKING:
    from mapet_mm.tokenizers import TokenStore


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = described_parser(__doc__)
    add_tokenizer_options(parser)
    parser.add_argument("--out", help="token store to write; default: the config's token_store")
    parser.add_argument(
        "--verify",
        type=int,
        nargs="?",
        const=256,
        metavar="IMAGES",
        help="write nothing: check the store's files, and the tokens of this many random images (default "
        "256)",
    )
    parser.add_argument("--retry-skipped", action="store_true", help="try the images again that were skipped")
    return parser.parse_args()


@one_line_errors
def main() -> None:
    """Extract or verify, and print the next command."""
    args = parse_args()
    from mapet_mm.engine.runners.launch import read_config
    from mapet_mm.tokenizers.fit_and_extract import run_extract_tokens, run_verify_tokens
    from mapet_mm.utils.dist import choose_device, is_first_process, say_share

    cfg = read_config(args.config, args.cfg_options)
    if args.out:
        cfg.token_store = args.out
    if args.on_error:
        cfg.on_error = args.on_error
    if args.max_skipped is not None:
        cfg.max_skipped = args.max_skipped
    say_share()
    choose_device()
    if args.verify is not None:
        store, verification = run_verify_tokens(cfg, args.verify)
        print(f"{store.path}: all files are whole, {verification}")
        return
    store, extraction = run_extract_tokens(cfg, args.retry_skipped)
    if is_first_process():
        rows, columns = store.grid
        done = "wrote" if extraction.images else "kept"
        print(extraction)
        print(
            f"{done} {store.path}: {rows} x {columns} tokens of {int(store.written().sum())} images, "
            f"{store.vocab_size} ids, tokenizer {store.tokenizer[:12]}{next_line(next_step(cfg, store))}"
        )


def next_step(cfg: Config, store: "TokenStore") -> str:
    """The training command if the config's `next_config` reads this store, else what recipes need."""
    following = cfg.get("next_config")
    note = ""
    if following and Path(in_package(following)).is_file():
        if repr(str(store.path)) in str(read_file(following).get("train_dataloader")):
            return shell_command(cfg, ["train", following])
        note = f"; not {following}, which reads another store"
    load = dict(type="mapet_mm.LoadTokenGrid", store=str(store.path))
    return (
        f"{shell_command(cfg, ['train', 'CONFIG'])}  # with {load} in its pipeline and "
        f"vocab_size={store.vocab_size} in its model{note}"
    )


if __name__ == "__main__":
    main()
