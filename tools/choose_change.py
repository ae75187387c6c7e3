"""Keep as much of what a pre-training changed of its start as suits k-NN on held-out images.

    mapet-mm choose-change RUN

RUN is the folder of a mapet-mm pretrain with --init START --change knn, which runs this after the training.
Writes the start plus 0, 1/4, 1/2, 3/4 or all of the change beside the last checkpoint. Features are kept in
--cache, so that the same command resumes after a kill.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from command_line import add_cache_option, described_parser

from mapet_mm.utils.errors import UserError, one_line_errors


def parse_args() -> argparse.Namespace:
    parser = described_parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a mapet-mm pretrain")
    add_cache_option(parser)
    return parser.parse_args()


@one_line_errors
def main() -> None:
    args = parse_args()
    from mmengine.logging import MMLogger

    from mapet_mm.cli.change import choose_change
    from mapet_mm.utils.dist import choose_device, run_alone
    from mapet_mm.utils.run_folder import CHOOSING, Run

    run_alone()
    choose_device()
    MMLogger.get_instance("choose_change", log_level="WARNING")  # MMEngine logs initialisations
    if not (args.run / CHOOSING).is_file():
        raise UserError(f"{args.run} is no RUN of `mapet-mm pretrain --init START --change knn` with labels")
    cache = args.cache.absolute()
    os.chdir(args.run)  # to which a RUN's paths are relative
    choose_change(Run(Path()), cache)


if __name__ == "__main__":
    main()
