"""Evaluate a backbone's frozen features: nearest neighbours, probes, few labels, segmentation.

    mapet-mm evaluate MODEL --data FOLDER --out OUT
    mapet-mm evaluate MODEL CHECKPOINT --compare OTHER_MODEL OTHER_CHECKPOINT
    mapet-mm evaluate RUN

MODEL is a config of a pre-training, a classifier or a bare backbone; timm:NAME or
hf:NAME_OR_FOLDER; a folder or file that mapet-mm convert wrote; the folder of a mapet-mm pretrain; or
mapet://NAME. Without CHECKPOINT the weights are the library's; a config names its own, or they are random.
Features are computed once and kept in --cache. After a kill, the same command resumes. Any number of
processes on any number of machines share the work: start the same command any number of times, under
torchrun, under srun or by hand.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import add_cache_option, add_config_options, add_tiles_option, described_parser

from mapet_mm.cli.data_options import (
    add_class_options,
    add_picture_options,
    add_workers_option,
    picture_options,
)
from mapet_mm.utils.errors import UserError, one_line_errors

if TYPE_CHECKING:
    from mapet_mm.evaluation.models import Model
    from mapet_mm.evaluation.tables import Row


def parse_args() -> argparse.Namespace:
    parser = described_parser(__doc__)
    parser.add_argument("model", help="config or name of a model")
    parser.add_argument("checkpoint", nargs="?", help="its weights")
    parser.add_argument(
        "--compare",
        nargs="+",
        action="append",
        default=[],
        metavar=("MODEL", "CHECKPOINT"),
        help="another model to compare with; can be given several times",
    )
    parser.add_argument(
        "--data",
        help="folder of images (`train` and `val`, a folder per class, ADE20K, Pascal VOC, Cityscapes), or a "
        "config whose section `evaluation` names image sets and protocols; by default MODEL's own section",
    )
    for name, what in (("mean", "mean"), ("std", "standard deviation")):
        parser.add_argument(
            f"--{name}",
            nargs="+",
            type=float,
            metavar="VALUE",
            help=f"{what} of MODEL's images, of values between 0 and 1, in place of its own: R G B, or one a "
            "band",
        )
    parser.add_argument(
        "--prefix", help="of the backbone's names in CHECKPOINT, if they are not at a usual place: 'encoder.'"
    )
    parser.add_argument("--size", type=int, help="side of MODEL's images in pixels, in place of its own")
    add_workers_option(parser)
    add_picture_options(parser)
    add_tiles_option(parser)
    add_class_options(parser, "of the images of a folder, or of a RUN's held-out images")
    parser.add_argument(
        "--protocols",
        nargs="+",
        metavar="NAME",
        help="run these, as DATA declares them if it does (default: those that it declares, or quick ones)",
    )
    parser.add_argument("--all", action="store_true", help="run the expensive protocols, too")
    parser.add_argument(
        "--no-random",
        action="store_true",
        help="leave out the column of the same network with random weights, which a single model has",
    )
    add_cache_option(parser)
    parser.add_argument("--out", type=Path, help="folder for results.json and the page, report.html")
    add_config_options(parser)
    return parser.parse_args()


@one_line_errors
def main() -> None:
    args = parse_args()
    from mmengine.logging import MMLogger

    from mapet_mm.cli.held_out import choice_words
    from mapet_mm.cli.other_classes import with_other_classes
    from mapet_mm.evaluation.folders import pictures_in_numbers
    from mapet_mm.evaluation.images import Data
    from mapet_mm.evaluation.models import find_model, random_twin
    from mapet_mm.evaluation.run import evaluate
    from mapet_mm.evaluation.tables import results_table
    from mapet_mm.utils.atomic_files import replace_json
    from mapet_mm.utils.dist import choose_device, is_first_process, print_once, say_share
    from mapet_mm.utils.tables import format_table
    from mapet_mm.visualization.report import Report, write_report

    say_share()
    choose_device()
    MMLogger.get_instance("evaluate_features", log_level="WARNING")  # MMEngine logs initialisations
    models = [[args.model, args.checkpoint] if args.checkpoint else [args.model], *args.compare]
    for given in models:
        if len(given) > 2:
            raise UserError(f"--compare {' '.join(given)}: one model and one checkpoint")
    changes = dict(options=args.cfg_options, prefix=args.prefix, mean=args.mean, std=args.std, size=args.size)
    pictures = pictures_in_numbers(picture_options(args), args.data)
    requests = []
    for given in models:
        asked = changes if given is models[0] else {}
        requests.append(find_model(*given, pictures=pictures, **asked))
    loaded = [request.load() for request in requests]
    if not (args.compare or args.no_random):
        twin = random_twin(requests[0], loaded[0])
        if twin:
            print_once("the same network with random weights takes its features, too (without: --no-random)")
            loaded.append(twin)
    data = Data(args.data, args.labels, args.class_level, args.groups, args.workers, args.tiles)
    config, data = with_other_classes(loaded[0].config, args.model, data, args.cache)
    loaded[0] = replace(loaded[0], config=config)
    columns: dict[str, Model] = {}
    for model in loaded:
        name = f"{model.name} ({len(columns) + 1})" if model.name in columns else model.name
        columns[name] = model

    def show(row: Row) -> None:
        if not row.detail:
            print(f"  {row.name}: {row.text} {row.unit}", flush=True)

    def keep(results: Mapping[str, Sequence[Row]]) -> None:
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            figures = {name: [asdict(row) for row in rows] for name, rows in results.items()}
            replace_json(args.out / "results.json", figures)

    results = evaluate(columns, data, args.cache, args.protocols, args.all, show, keep)
    if not is_first_process():
        return
    table = results_table(results)
    print(f"\n{format_table(table)}")
    about_choice = choice_words(args.model, args.checkpoint, args.data)
    if about_choice:
        print(f"\n{about_choice}")
    if args.out:
        summary = f"Frozen features of {', '.join(results)}."
        command = shlex.join(["python", *sys.argv])
        page = write_report(args.out / "report.html", Report("Features", summary, table, commands=[command]))
        print(f"wrote {args.out / 'results.json'} and {page} (open it in a browser)")


if __name__ == "__main__":
    main()
