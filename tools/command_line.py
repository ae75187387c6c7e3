"""Command lines of the tools: help with the lines of a docstring, and options that several of them take."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmengine.config import DictAction

from mapet_mm.cli.data_options import TILES, as_argument
from mapet_mm.utils.commands import TOOLS

# Stands for a space inside a text while MMEngine reads a value, of which it removes all spaces.
SPACE = "\ue000"
# By these MMEngine tells lists and their entries.
LIST_MARKS = ",[]()"


class ConfigOptions(DictAction):
    """MMEngine's `KEY=VALUE ...`, which leaves texts with spaces and the paths of files as they are.

    `a=1,2`, `a=[1, 2]` and `a=(1, 2)` are lists and a tuple, as in MMEngine. What names something that is
    there, or in a folder that is, is a path, whatever is in it: `batch_size=4,lr=0.1/epoch_1.pth`.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Sequence[str],
        option_string: str | None = None,
    ) -> None:
        for pair in values:
            key, is_pair, text = pair.partition("=")
            if not is_pair:
                parser.error(f"{option_string} {pair}: it takes KEY=VALUE")
            is_path = os.path.exists(text) or os.path.isdir(os.path.dirname(text))
            if is_path and set(text) & {*LIST_MARKS, *" '\""}:
                found = text
            else:
                read = argparse.Namespace()
                super().__call__(parser, read, [f"{key}={_with_marks(text)}"], option_string)
                found = _with_spaces(getattr(read, self.dest)[key])
            options = {**(getattr(namespace, self.dest) or {}), key: found}
            setattr(namespace, self.dest, options)
        namespace.given_options = [*getattr(namespace, "given_options", []), *values]


def given_options(args: argparse.Namespace) -> list[str]:
    """`--cfg-options` and what was given with it, for the next command; empty without any."""
    given = getattr(args, "given_options", [])
    return ["--cfg-options", *given] if given else []


def _with_marks(value: str) -> str:
    """A value in which `SPACE` stands for each space that is inside a text."""
    value = value.strip()
    is_list = "," in value or (value[:1] in LIST_MARKS and value[-1:] in LIST_MARKS)
    if not is_list:
        return value.replace(" ", SPACE)
    between_marks = re.split(rf"([{re.escape(LIST_MARKS)}])", value)
    return "".join(part.strip().replace(" ", SPACE) for part in between_marks)


def _with_spaces(value: Any) -> Any:
    """A value, or a list of them, with its spaces again."""
    if isinstance(value, list | tuple):
        return type(value)(_with_spaces(one) for one in value)
    return value.replace(SPACE, " ") if isinstance(value, str) else value


def described_parser(description: str) -> argparse.ArgumentParser:
    """A parser whose help shows a tool's docstring line by line."""
    by_line = argparse.RawDescriptionHelpFormatter
    own_file = Path(sys.argv[0]).name
    names = {Path(file).name: name for name, (file, _) in TOOLS.items()}
    command = f"mapet-mm {names[own_file]}" if own_file in names else None
    return argparse.ArgumentParser(command, description=description, formatter_class=by_line)


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Add `--cfg-options`, changes to a config's entries."""
    parser.add_argument(
        "--cfg-options",
        nargs="+",
        action=ConfigOptions,
        metavar="KEY=VALUE",
        help="change entries of the config, for example randomness.seed=1 model.head.num_classes=7",
    )


def add_cache_option(parser: argparse.ArgumentParser) -> None:
    """Add `--cache`, the folder where features are kept and found again."""
    default = Path("work_dirs/features")
    parser.add_argument(
        "--cache", type=Path, default=default, help="folder of the features (default: %(default)s)"
    )


def add_tiles_option(parser: argparse.ArgumentParser) -> None:
    """Add `--tiles`: the images of a folder are divided."""
    parser.add_argument(
        "--tiles",
        type=as_argument(TILES),
        metavar=TILES.metavar,
        help="divide each picture of a folder into tiles of so many of its pixels, with an overlap, each an "
        "image of the name FILE#x,y",
    )


def add_runner_options(parser: argparse.ArgumentParser) -> None:
    """Add a config, and options of everything that MMEngine's Runner does with it."""
    parser.add_argument("config", help="config file")
    parser.add_argument("--work-dir", help="folder for logs; default: <config> in its work_root or work_dirs")
    parser.add_argument("--amp", action="store_true", help="mixed precision, on GPU or CPU")
    parser.add_argument(
        "--trust-checkpoint",
        action="store_true",
        help="load checkpoints that hold Python objects, which can run code: only files you trust",
    )
    parser.add_argument("--launcher", choices=["none", "pytorch", "slurm", "mpi"], default="none")
    # `mim train --launcher pytorch` starts torch.distributed.launch, which adds this to LOCAL_RANK.
    parser.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    add_config_options(parser)


def add_tokenizer_options(parser: argparse.ArgumentParser) -> None:
    """Add a tokenizer's config, and the choice of leaving images out."""
    parser.add_argument("config", help="tokenizer config, for example configs/micro/kclip.py")
    parser.add_argument(
        "--on-error",
        choices=("raise", "skip"),
        help="images that cannot be decoded or encoded: stop after all others (the default), or leave "
        "them out, which a store records",
    )
    parser.add_argument(
        "--max-skipped",
        type=float,
        metavar="SHARE",
        help="stop if more than this share of the images is left out (default: the config's, else 0.05)",
    )
    add_config_options(parser)
