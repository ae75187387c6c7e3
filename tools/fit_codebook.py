"""Fit a codebook: grid features of a tokenizer config's images, clustered by k-means.

Run again to continue after an interruption. Under torchrun or srun, the processes share the images and the
clustering; the codebook is the same for any number of them.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import add_tokenizer_options, described_parser, given_options
from mmengine.config import Config

from mapet_mm.utils.commands import next_line
from mapet_mm.utils.config import shell_command
from mapet_mm.utils.errors import one_line_errors

if TYPE_CHECKING:
    from mapet_mm.tokenizers import Codebook


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = described_parser(__doc__)
    add_tokenizer_options(parser)
    parser.add_argument("--out", help="codebook to write; default: the config's tokenizer.codebook")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing codebook")
    parser.add_argument(
        "--launcher", choices=("none", "pytorch", "slurm", "mpi"), help="default: what started them"
    )
    return parser.parse_args()


@one_line_errors
def main() -> None:
    """Fit, save, and print the next command."""
    args = parse_args()
    from mmengine.dist import is_main_process

    from mapet_mm.engine.runners.launch import read_config
    from mapet_mm.tokenizers.fit_and_extract import features_folder, run_fit_codebook
    from mapet_mm.utils.dist import (
        choose_device,
        print_once,
        run_alone,
        start_processes,
        stop_processes,
    )

    cfg = read_config(args.config, args.cfg_options)
    if args.on_error:
        cfg.on_error = args.on_error
    if args.max_skipped is not None:
        cfg.max_skipped = args.max_skipped
    if args.launcher == "none":
        run_alone()
    choose_device()
    join = partial(start_processes, args.launcher)
    target = Path(args.out or cfg.get("tokenizer", {}).get("codebook") or "")
    is_there = target.is_file() and not args.overwrite
    path, codebook = run_fit_codebook(cfg, args.out, args.overwrite, join)
    if is_there:
        print_once(f"nothing to do: {path} is there, made with these settings")
    elif is_main_process():
        report(cfg, args, path, codebook, features_folder(path))
    stop_processes()


def report(cfg: Config, args: argparse.Namespace, path: Path, codebook: "Codebook", features: Path) -> None:
    size = sum(file.stat().st_size for file in features.rglob("*")) / 2**20
    print(f"wrote {path}: {codebook.k} centroids of {codebook.dim} channels, digest {codebook.digest[:12]}")
    num_distinct = len(codebook.centroids.unique(dim=0))
    if num_distinct < codebook.k:
        print(
            f"warning: {num_distinct} of {codebook.k} centroids are distinct, so no more tokens are used: "
            "look at the images, at `data_preprocessor`, and at the encoder's weights and `layer`"
        )
    options = given_options(args)
    if args.out:
        options = [*(options or ["--cfg-options"]), f"tokenizer.codebook={path}"]
    following = next_line(shell_command(cfg, ["extract-tokens", args.config, *options]))
    kept = f"kept {features} ({size:.0f} MiB of sampled features): delete it once the codebook is good"
    print(f"{kept}{following}")


if __name__ == "__main__":
    main()
