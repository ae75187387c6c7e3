"""Tokenise a tokenizer config's images into its token store; run again to continue after an interruption.

Under torchrun (or with `--launcher slurm`), the processes share the images.
"""

import argparse

from mmengine.config import DictAction
from mmengine.dist import is_main_process

from mapet_mm.engine.freed_memory import keep_freed_memory
from mapet_mm.engine.launch import read_config
from mapet_mm.engine.processes import start_processes, stop_processes
from mapet_mm.errors import one_line_errors
from mapet_mm.tokenizers.recipe import run_extract_tokens, run_verify_tokens


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="tokenizer config, for example configs/digits/kclip_digits.py")
    parser.add_argument("--out", help="token store to write; default: the config's token_store")
    parser.add_argument(
        "--verify",
        type=int,
        nargs="?",
        const=256,
        metavar="IMAGES",
        help="write nothing: check the store's files, and the tokens of so many random images (default 256)",
    )
    parser.add_argument("--launcher", choices=("none", "pytorch", "slurm"), help="how processes are started")
    parser.add_argument(
        "--cfg-options", nargs="+", action=DictAction, help="override settings: key=value ..."
    )
    return parser.parse_args()


@one_line_errors
def main() -> None:
    """Extract or verify, and say what comes next."""
    args = parse_args()
    cfg = read_config(args.config, args.cfg_options)
    if args.out:
        cfg.token_store = args.out
    if args.verify is not None:
        store, verification = run_verify_tokens(cfg, args.verify)
        print(f"{store.path}: checksums hold, {verification}")
        return
    keep_freed_memory()
    start_processes(args.launcher)
    store, extraction = run_extract_tokens(cfg)
    if is_main_process():
        rows, columns = store.grid
        print(extraction)
        print(
            f"wrote {store.path}: {rows} x {columns} tokens of {len(store)} images, "
            f"{store.vocab_size} ids, tokenizer {store.tokenizer[:12]}"
        )
        print(f"next: python tools/train.py {cfg.get('next_config', 'CONFIG')}")
    stop_processes()


if __name__ == "__main__":
    main()
