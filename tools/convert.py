"""Weights under other names: the authors' (reference), this package's (mm), timm's, Hugging Face's (hf).

    python tools/convert.py mm timm work_dirs/RUN/epoch_300.pth vit.safetensors
    python tools/convert.py reference mm mapet_small.tar mapet_small.pth

Written are the weights alone: as .safetensors, or as .pth, which `init_cfg`, `load_from` and tools/test.py
take.
"""

import argparse
from pathlib import Path

from mapet_mm.convert import FROM_MM, TO_MM
from mapet_mm.errors import UserError, one_line_errors
from mapet_mm.weight_files import read_weights, write_weights


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(TO_MM)
    parser.add_argument("source", choices=TO_MM, metavar="FROM", help=f"whose names IN has: {names}")
    parser.add_argument("target", choices=FROM_MM, metavar="TO", help=f"whose names OUT gets: {names}")
    parser.add_argument("input", type=Path, metavar="IN", help="checkpoint, .safetensors or torch.save's")
    parser.add_argument("output", type=Path, metavar="OUT", help="file to write, .safetensors or .pth")
    return parser.parse_args()


@one_line_errors
def main() -> None:
    args = parse_args()
    weights = read_weights(args.input)
    try:
        converted = FROM_MM[args.target](TO_MM[args.source](weights))
    except ValueError as error:
        raise UserError(f"{args.input}: {error}") from error
    write_weights(args.output, converted)
    count = sum(value.numel() for value in converted.values())
    print(f"wrote {args.output}: {len(converted)} tensors, {count:,} values, names of {args.target}")


if __name__ == "__main__":
    main()
