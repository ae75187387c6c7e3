"""Command lines of the tools: help with the lines of a docstring, and options that several of them take."""

import argparse
import sys
from pathlib import Path

from mmengine.config import DictAction

from mapet_mm.utils.commands import TOOLS


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
        action=DictAction,
        metavar="KEY=VALUE",
        help="change entries of the config, for example randomness.seed=1 model.head.num_classes=7",
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
