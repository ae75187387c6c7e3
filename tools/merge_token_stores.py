"""Merge token stores of one tokenizer, for example parts extracted on several machines."""

import shlex

from command_line import described_parser

from mapet_mm.utils.errors import one_line_errors


@one_line_errors
def main() -> None:
    """Merge, and print what is left to do."""
    parser = described_parser(__doc__)
    parser.add_argument("stores", nargs="+", help="token stores to merge; no image may be in two of them")
    parser.add_argument("--out", required=True, help="token store to write")
    args = parser.parse_args()
    from mapet_mm.tokenizers import TokenStore, merge_stores

    merged = merge_stores(args.out, [TokenStore.open(path) for path in args.stores])
    print(f"wrote {merged.path}: {len(merged)} images of {len(args.stores)} token stores")
    num_missing = merged.missing().size
    if num_missing:
        following = shlex.join(["mapet-mm", "extract-tokens", "CONFIG", "--out", str(merged.path)])
        print(f"{num_missing} have no tokens yet: {following}")


if __name__ == "__main__":
    main()
