"""Tokenise a tokenizer config's images into its token store; run again to continue after an interruption."""

import argparse
import sys

from mmengine.config import Config, DictAction

from mapet_mm.tokenizers.recipe import run_extract_tokens


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", help="tokenizer config, for example configs/digits/kclip_digits.py")
    parser.add_argument("--out", help="token store to write; default: the config's token_store")
    parser.add_argument(
        "--cfg-options", nargs="+", action=DictAction, help="override settings: key=value ..."
    )
    return parser.parse_args()


def main() -> None:
    """Extract, and say what comes next."""
    args = parse_args()
    cfg = Config.fromfile(args.config)
    cfg.merge_from_dict(args.cfg_options or {})
    if args.out:
        cfg.token_store = args.out
    try:
        store, done = run_extract_tokens(cfg)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    rows, columns = store.grid
    print(
        f"wrote {store.path}: {rows} x {columns} tokens of {len(store)} images ({done} now), "
        f"{store.vocab_size} ids, tokenizer {store.tokenizer[:12]}"
    )
    print(f"next: python tools/train.py {cfg.get('next_config', 'CONFIG')}")


if __name__ == "__main__":
    main()
