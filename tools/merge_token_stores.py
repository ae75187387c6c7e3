"""Merge token stores of one tokenizer, for example parts extracted on several machines."""

import argparse

from mapet_mm.utils.errors import one_line_errors


@one_line_errors
def main() -> None:
    """Merge, and print what is left to do."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stores", nargs="+", help="token stores to merge; no image may be in two of them")
    parser.add_argument("--out", required=True, help="token store to write")
    args = parser.parse_args()
    from mapet_mm.tokenizers import TokenStore, merge_stores

    merged = merge_stores(args.out, [TokenStore.open(path) for path in args.stores])
    print(f"wrote {merged.path}: {len(merged)} images of {len(args.stores)} token stores")
    if missing := merged.missing().size:
        print(f"{missing} have no tokens yet: python tools/extract_tokens.py CONFIG --out {merged.path}")


if __name__ == "__main__":
    main()
